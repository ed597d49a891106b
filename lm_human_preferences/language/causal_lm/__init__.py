"""Causal language models of transformers, imported only where needed: it takes seconds."""
