"""Data sets: each module yields the texts of one data set, whatever the task and tokeniser."""
