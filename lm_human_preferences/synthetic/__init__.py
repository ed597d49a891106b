"""A small world in which everything is known: a language model trained here, and a reward given
by a formula.

Knows the film reviews of `datasets.reviews`; knows neither tasks nor labels. Downloads nothing.
"""
