"""Where reward models are, and several of them as one reward.

Knows the directories and settings of runs, and what an ensemble makes of its members' scores; does
not know what computes a score.

    places.py    which directories and checkpoints hold the reward models of a run
    ensemble.py  the mean of several reward models, and how far they differ
"""
