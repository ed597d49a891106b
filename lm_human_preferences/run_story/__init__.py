"""Facts about a run, from its files alone, and their words; damaged files fail nothing."""
