"""Human labels: files that are read and checked, and folders that collect what people answer.

Knows label types and tasks; knows no reward model and trains nothing.
"""
