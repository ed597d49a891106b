"""The hyperparameter classes, apart from the code that reads them so that the command line need not load torch."""
