"""Tokenisers and chat templates of models that transformers saved."""
