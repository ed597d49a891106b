"""What both trainings share: checks before they start, what they tell the person at the console.

Knows the trainings' hyperparameters and the statistics of their steps; knows neither networks nor files of a run.
"""
