"""Common parts of trainings: loop, optimizer, KL, precision, log-probabilities, memory, console."""
