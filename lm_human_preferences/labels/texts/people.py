"""Names of people who answered, as tools and tables have them."""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from lm_human_preferences.datasets.fields import is_empty
from lm_human_preferences.labels.answers import GIVEN_BY
from lm_human_preferences.runs.run_files import LABELLER

# Names of the field that says who answered
FIELDS = (GIVEN_BY, 'labeler', 'annotator', 'Labeller', 'Labeler', 'Annotator')


def labeller(record: Mapping[str, Any]) -> str | None:
    """Return the name of who answered, the same for 1, 1.0, '1' and '1.0'; None for nobody."""
    value = next((record[name] for name in FIELDS if name in record), None)
    if is_empty(value):
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    name = re.sub(r'^(\d+)\.0$', r'\1', str(value).strip())  # as tables write a number
    return name if LABELLER.fullmatch(name) else annotator(value)


def annotator(user: Any) -> str | None:
    """Return a name for a user of another tool; a digest keeps similar addresses apart."""
    if isinstance(user, dict):
        user = user.get('id', user.get('email'))
    if user is None:
        return None
    user = str(user)
    name = re.sub(r'[^A-Za-z0-9_-]', '-', user)
    if name != user or len(name) > 22:
        digest = hashlib.sha256(user.encode(errors='replace')).hexdigest()
        name = f'{name[:13]}-{digest[:8]}'
    return f'annotator-{name}'
