"""What is known about a run, from its files alone, and how it is told.

    facts.py       what the files of a run say, as values
    label_facts.py the same of the labels that a reward model learned from
    curves.py      its curves, alarms and resumes, from TensorBoard's events
    happenings.py  what happened on the way: alarms, interruptions, new reward models
    commands.py    the command that repeats it
    sentences.py   facts in words
    summary.py     the few sentences that say most
    markdown.py    text of others, made safe in Markdown
    model_card.py  the page of an exported model

Reads runs, labels and evaluations; computes nothing and trains nothing. What no file says is told
as not known: nothing here fails because a file is missing or damaged.
"""
