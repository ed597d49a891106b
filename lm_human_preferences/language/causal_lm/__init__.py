"""Causal language models of transformers, driven from outside, as the models of most families are.

transformers takes seconds to import, so it is imported where such a model is really needed.
"""
