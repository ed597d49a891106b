"""Trainers of policies and reward models; `additions` holds features new in this program."""
