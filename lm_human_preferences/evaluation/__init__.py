"""Evaluation of a run's policy against the best possible policy at the same KL."""
