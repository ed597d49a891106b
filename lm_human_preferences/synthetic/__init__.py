"""Tiny language model of made-up film reviews, and their exactly known reward; no downloads."""
