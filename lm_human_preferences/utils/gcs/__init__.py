"""Placeholder of the original's utils/gcs.py; storage/ reads remote files now."""

from lm_human_preferences.utils.original_names import refuse

refuse(__name__)
