"""The language model: encodings, GPT-2, released and saved models, sampling.

Knows tokens and networks; knows neither rewards nor tasks. Sampling knows no encoding.
"""
