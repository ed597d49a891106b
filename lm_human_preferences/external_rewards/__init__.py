"""Rewards that read texts, decoded for them: a function of the user's, or a classifier."""
