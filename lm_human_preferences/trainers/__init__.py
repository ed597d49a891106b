"""Trainers of policies, reward models and heads, and the labels that reward models learn from."""
