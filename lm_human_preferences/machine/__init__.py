"""Processors of this machine, and settings for them; knows nothing of networks or runs."""
