"""Placeholder of the original's utils/gcs.py; storage/ reads Google's cloud now."""

from lm_human_preferences.utils.original_names import refuse

refuse(__name__)
