"""Directory of a run: its lock, settings, record and files, and its copy in remote storage."""
