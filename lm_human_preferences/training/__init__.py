"""What trainings share: loop, hooks, micro-batches, optimizer, precision, memory, console.

Knows hyperparameters and the statistics of steps, but not how networks or tasks are made.
"""
