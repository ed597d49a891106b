"""The processors that this runs on, and what suits them; knows nothing of networks or runs."""
