"""Paper's figures from many short runs: knows the trainings and their results."""
