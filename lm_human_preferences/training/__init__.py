"""What trainings have in common: optimizer, precision, memory, health, what the console shows.

Knows hyperparameters and the statistics of steps; knows neither networks nor files of a run.
"""
