"""Classes of hyperparameters and their valid values, without torch or the code that uses them."""
