"""Texts: one module for each data set, a generator of strings.

Knows where texts come from and how they are cleaned; knows neither tokens nor tasks.
"""
