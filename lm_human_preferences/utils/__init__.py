"""Foundations: options, settings, tensor functions, the console; no models, labels or runs."""
