"""A small world in which everything is known: its language model and its reward.

The model is trained here, and the reward is given by a formula.

Knows the film reviews of `datasets.reviews`; knows neither tasks nor labels. Downloads nothing.
"""
