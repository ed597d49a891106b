"""Rewards that read decoded texts: a function of the user's, or a classifier."""
