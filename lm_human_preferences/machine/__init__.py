"""Processors of this machine, and settings for them, without networks or runs."""
