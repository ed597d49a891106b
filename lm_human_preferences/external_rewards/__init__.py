"""Rewards that are not models of our own: a function of the user's, a classifier of transformers.

They read texts, so that the policy's tokens are decoded first. Knows how such a reward is loaded
and asked; does not know what is done with its scores.

    texts.py             tokens as texts, for a reward that reads those
    function.py          a function in a file of the user's
    classifier.py        a sequence classifier of transformers
    classifier_files.py  what of a classifier's directory is read, and what is refused
"""
