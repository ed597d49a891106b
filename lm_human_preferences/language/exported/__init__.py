"""Reward models as transformers' sequence classifiers: the network, and its tokeniser."""
