"""A run's directory: its lock, settings and files, and its copy in remote storage.

Knows the files of a run by name; does not know what is in them, but for the settings.

    run_files.py     which files each command writes
    run_dir.py       beginning, resuming and ending a run in its directory
    run_lock.py      one process writes a run at a time
    run_settings.py  the settings of a run that is resumed, against those it began with
    label_record.py  which labels a reward model learned from
    reward_function.py  the file with a user's reward function, and its copy
    uploads.py       a run in a remote directory
"""
