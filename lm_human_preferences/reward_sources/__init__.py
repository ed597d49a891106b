"""Rewards that a policy can learn from: functions, classifiers and models trained on labels."""
