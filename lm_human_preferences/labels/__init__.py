"""Human labels: files that are read and checked, and labels made up by a known reward.

Knows label types and tasks; knows no reward model and trains nothing.
"""
