"""Checkpoints in the format of TensorFlow: saving them in the background, resuming from them.

The only room that knows files of TensorFlow. Knows tensors by name; knows neither networks nor
algorithms.
"""
