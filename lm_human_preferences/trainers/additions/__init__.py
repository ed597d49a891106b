"""Additions to the original training: resuming, head training, tracked samples, console output."""
