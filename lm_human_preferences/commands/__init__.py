"""What a command does besides training: sample, export, check this machine, a dry run.

Uses all other rooms; only `utils.launch` and the scripts use it. `program` is the command line
itself, in click's terms.
"""
