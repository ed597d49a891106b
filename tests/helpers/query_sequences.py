"""Sequences of a data set by the options of QueryRules."""

from lm_human_preferences.language.datasets import QueryRules


def sequences_of(dataset, length, *, comm=None, repeat_count=None, mode='train', **options):
    rules = QueryRules(length, mode, **options)
    return dataset.sequences(rules, comm=comm, repeat_count=repeat_count)
