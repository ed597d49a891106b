"""The classes of hyperparameters, apart from the code that reads them: the command line loads no
torch.

Knows which values make sense; knows not what they do.
"""
