"""A run's directory: its lock, settings and files, and its copy in remote storage."""
