"""Reward by a linear head on the frozen initial model's hidden states: fit, uncertainty, file."""
