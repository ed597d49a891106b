"""Exactly known reward of made-up film reviews; no downloads."""
