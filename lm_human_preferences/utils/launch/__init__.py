"""Launching, which cli/ and distributed/ do now."""

from lm_human_preferences.utils.original_names import refuse

refuse(__name__)
