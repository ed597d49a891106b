"""Placeholder for the original's utils/launch.py; here cli/ and distributed/ start jobs."""

from lm_human_preferences.utils.original_names import refuse

refuse(__name__)
