"""Exactly known reward for made-up film reviews, which needs no downloads."""
