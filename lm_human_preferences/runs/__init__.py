"""A run's directory: its lock, settings and files, and its mirror in remote storage.

Knows the files of a run by name; knows not what is in them.
"""
