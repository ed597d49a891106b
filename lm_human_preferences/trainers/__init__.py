"""Trainers of policies and reward models; `additions` has what the original program lacked."""
