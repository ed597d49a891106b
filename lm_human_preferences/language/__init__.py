"""The language model: encodings, networks, released and saved models, sampling.

Knows tokens and networks; knows neither rewards nor tasks. Sampling knows no encoding.
"""
