"""Labels for reward training: read from files and checked, or simulated.

Knows label types and tasks; knows no reward model but the known one, and trains nothing.
"""
