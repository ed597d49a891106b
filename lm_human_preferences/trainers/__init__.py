"""Trainers of policies, reward models and heads; loading of labels to train reward models on."""
