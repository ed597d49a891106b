"""Placeholder of the original's utils/launch.py; cli/ and distributed/ start jobs now."""

from lm_human_preferences.utils.original_names import refuse

refuse(__name__)
