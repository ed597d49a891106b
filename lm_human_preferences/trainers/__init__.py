"""Trainers of policy and reward model, and hooks of a step: console, alarms, checkpoints."""
