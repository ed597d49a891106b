"""Classes that define and check hyperparameters; the package loads neither torch nor trainers."""
