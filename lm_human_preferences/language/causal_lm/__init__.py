"""Causal language models of transformers, a library that takes seconds to import."""
