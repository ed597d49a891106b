"""Trainers of policies and reward models, and hooks that print, check and save after a step."""
