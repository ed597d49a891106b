"""A small world in which everything is known: a language model made here, a reward by formula.

Knows the film reviews of `datasets.reviews`; nothing in it is downloaded.
"""
