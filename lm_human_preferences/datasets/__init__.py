"""Texts: one module for each data set, a generator of strings. Knows neither tokens nor tasks."""
