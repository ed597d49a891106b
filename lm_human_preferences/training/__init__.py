"""What trainings share: loop, hooks, optimizer, KL controllers, precision, memory, console.

Knows hyperparameters and the statistics of steps, but not how networks or tasks are made.
"""
