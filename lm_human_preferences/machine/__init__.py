"""The processors that this runs on: what they can do, and what suits them.

Knows nothing of networks or of runs: both are chosen for by numbers that are handed in.
"""
