"""Data set `tldr`: Reddit posts whose authors added a summary."""

import random
import re
from collections.abc import Iterator

import ftfy

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError

URL = 'https://openaipublic.blob.core.windows.net/lm-human-preferences/tldr/{mode}-subset.json'


def generator(mode: str, seed: int = 0, shuffle: bool = False) -> Iterator[str]:
    """Yield the cleaned posts of the split `mode`, train or valid; test is the same as valid."""
    url = URL.format(mode='valid' if mode == 'test' else mode)
    posts = storage.read_json(url)
    is_list = isinstance(posts, list)
    if not is_list or not all(isinstance(post, dict) and 'content' in post for post in posts):
        raise UserError(f'{url} must be a list of posts, each with a field `content`')
    if shuffle:
        random.Random(seed).shuffle(posts)
    for post in posts:
        text = ftfy.fix_text(str(post['content']))
        yield re.sub(r'\n{3,}', '\n\n', text).strip()
