"""Evaluation of a policy against the best one possible: knows runs, policies and rewards."""
