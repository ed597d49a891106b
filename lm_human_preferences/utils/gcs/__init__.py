"""Placeholder for the original's utils/gcs.py; here storage/ reads remote files."""

from lm_human_preferences.utils.original_names import refuse

refuse(__name__)
