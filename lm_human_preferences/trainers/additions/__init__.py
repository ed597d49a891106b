"""What trainings have beyond the original: resuming, heads, tracked samples, their console."""
