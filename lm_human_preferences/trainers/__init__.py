"""Trainers of policies, reward models and heads, and the labels that they learn from."""
