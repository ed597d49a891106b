"""Checkpoints in TensorFlow's format: reading, saving in the background, and resuming."""
