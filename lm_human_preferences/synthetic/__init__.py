"""A small world in which everything is known: its language model, its reward. Downloads nothing."""
