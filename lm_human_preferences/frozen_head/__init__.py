"""Reward that is linear in the frozen initial model's states: its fit, uncertainty and file."""
