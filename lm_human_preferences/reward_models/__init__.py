"""Directories and checkpoints of the reward models of a run."""
