"""Causal language models of transformers; importing transformers takes seconds."""
