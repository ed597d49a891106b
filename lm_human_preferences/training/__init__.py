"""Code shared by all trainings: loop, hooks, optimizer, networks, precision, console output."""
