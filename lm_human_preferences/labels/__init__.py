"""Labels for reward training: read and checked, simulated, or collected from people in folders.

Knows label types and tasks; knows no reward model but the known one, and trains nothing.
"""
