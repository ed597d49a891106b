"""Files in Google's cloud, which storage/ reads now."""

from lm_human_preferences.utils.original_names import refuse

refuse(__name__)
