"""Basic modules for options, tensors and the console, independent of models, labels and runs."""
