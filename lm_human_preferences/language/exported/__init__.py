"""Reward models as transformers' sequence classifiers: the network, and a tokeniser for it.

Knows networks and encodings; does not know where a reward model is kept.
"""
