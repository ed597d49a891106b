"""Data sets: each module yields the texts of one, independently of tokenisers and tasks."""
