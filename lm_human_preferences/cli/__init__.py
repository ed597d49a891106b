"""The command line: options and --help from the classes of hparams/, and the start of a job.

    program.py         the program and its commands, in click's terms
    arguments.py       the words of a command line: what the original accepted, values, suggestions
    option_help.py     what --help says of an option
    launch.py          the commands of experiments; jobs on one rank or several
    user_settings.py   the user's settings over those of an experiment
    labelling.py       the commands about labels

Loads no torch. Hands a job over by name; only the two scripts use it.
"""
