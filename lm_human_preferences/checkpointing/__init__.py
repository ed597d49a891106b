"""Checkpoints in the format of TensorFlow: saving them in the background, resuming from them.

The only room that knows TensorFlow's checkpoint files. Knows tensors by name; knows neither
networks nor algorithms.

    names.py         the files of a checkpoint directory by name (loads no numpy)
    tf_table.py      the table that a checkpoint's index is
    tf_bundle.py     tensors in a checkpoint's files
    variables.py     what a checkpoint calls the tensors of a training
    checkpoints.py   saving, keeping the last twenty, verifying
    checkpointer.py  what a training calls: saving while it goes on, resuming
"""
