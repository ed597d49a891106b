"""Rewards from a linear head on the frozen initial model's hidden states."""
