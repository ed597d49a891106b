"""The commands that do not train: sample, export, doctor, a dry run, and those about labels.

Uses all rooms but cli/, which starts them. `evaluate` and `figures` are in evaluation/ and
reproduction/.
"""
