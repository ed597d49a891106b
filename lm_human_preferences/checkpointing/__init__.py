"""Checkpoints in TensorFlow's format, which only this package reads and writes."""
