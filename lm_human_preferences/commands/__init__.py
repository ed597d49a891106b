"""What a command does besides training: sample, export, check this machine, a dry run.

The topmost room: uses all others, and none uses it.
"""
