"""Checkpoints in TensorFlow's format, which only this room knows: saving and resuming."""
