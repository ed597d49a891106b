"""Data sets: a module with a generator of texts for each, independent of tokenisers and tasks."""
