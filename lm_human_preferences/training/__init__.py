"""Code shared by all trainings: the loop with its hooks, and Adam."""
