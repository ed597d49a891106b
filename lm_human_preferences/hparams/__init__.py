"""The classes of hyperparameters, without the code that uses them.

So the command line need not load torch. Knows which values are valid; does not know what they do.
"""
