"""Rewards that read texts, not tokens: a user's Python function, or a classifier."""
