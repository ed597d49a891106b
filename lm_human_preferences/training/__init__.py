"""Common parts of trainings: loop, optimizer, KL controllers, precision, memory, console."""
