"""Common parts of trainings: loop, hooks, optimizer, networks, precision, vocabulary, console."""
