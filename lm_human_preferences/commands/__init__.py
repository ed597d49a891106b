"""The commands that do not train: sample, export, doctor, a dry run, and those about labels.

Uses all other rooms; only `utils.launch` and the scripts use it. `program` is the command line
itself, in click's terms. `evaluate` and `figures` are in evaluation/ and reproduction/.
"""
