"""The paper's figures from many short runs.

Knows the trainings and their results; changes neither.
"""
