"""Data set `cnndm`: articles of CNN and the Daily Mail (github.com/abisee/cnn-dailymail)."""

import hashlib
import random
import re
from collections.abc import Iterator

import ftfy

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError

URL = 'https://openaipublic.blob.core.windows.net/lm-human-preferences/datasets/cnndm'
PREFETCH = 128  # number of stories downloaded at a time; a run needs few of the 312,000
DAILY_MAIL = ('dailymail.co.uk', 'mailonsunday.ie', 'lib.store.yahoo.net')
CNN = ('cnn.com', 'cnn.hk')


def generator(mode: str, seed: int = 0, shuffle: bool = False) -> Iterator[str]:
    """Yield the articles of the split `mode` (train, valid or test), without their highlights."""
    part = 'val' if mode == 'valid' else mode
    urls = storage.read_text(f'{URL}/url_lists/all_{part}.txt').strip().split('\n')
    if shuffle:
        random.Random(seed).shuffle(urls)
    for start in range(0, len(urls), PREFETCH):
        batch = urls[start : start + PREFETCH]
        stories = [f'{URL}/cache_{part}/{get_path_of_url(url.strip())}' for url in batch]
        for path in storage.cached_paths(stories):
            text = ftfy.fix_text(clean_up_start(storage.read_text(path)))
            text = re.sub(r'\n{3,}', '\n\n', text)
            yield text.split('@highlight')[0].strip()


def get_path_of_url(url: str) -> str:
    """Return the path of the story file for a web page's URL, relative to its split's folder."""
    if any(map(url.__contains__, DAILY_MAIL)):
        site = 'dailymail'
    elif any(map(url.__contains__, CNN)):
        site = 'cnn'
    else:
        raise UserError(
            f'{url!r} in the url_lists of {URL} is a page of neither CNN nor the Daily Mail'
        )
    return f'{site}/stories/{hashlib.sha1(url.encode()).hexdigest()}.story'


def clean_up_start(text: str) -> str:
    """Return an article without the byline, '(CNN) --' and dates of updates at its start."""
    if text.startswith('By'):
        text = '\n'.join(text.split('\n')[2:])
    text = re.split(r'\(CNN\) +--', text)[-1]
    text = text[:100].split('(CNN)')[-1] + text[100:]
    text = re.sub(r'^and \w+\n', '', text)
    # [0-5|] repeats an error: the original's [2011|2012|...] matches one character, not a year.
    text = re.split(r'.*UPDATED:\s+[0-9]{2}:[0-9]{2}.*[0-5|]', text)[-1]
    return text.replace('’', "'").replace('‘', "'").strip()
