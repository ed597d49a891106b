"""Runs that are damaged or half written, and texts that are markup: a page tells what is left."""

import os
import random as randoms
import shutil
from pathlib import Path

import pytest
from hostile_texts import HOSTILE, write_hostile_run
from markupsafe import Markup
from page_rules import markup_of, problems, words_of
from run_folders import EXPERIMENTS
from two_runs import make_two_runs

from lm_human_preferences.errors import UserError
from lm_human_preferences.report import page
from lm_human_preferences.report.run import read_run

COPIES = 10  # of each run
GONE, FOLDER, LINK = 'gone', 'folder', 'link'  # what may be in place of a file
# What may stand where JSON, or lines of JSON, should.
OTHER_CONTENT = {
    'no': GONE,
    'a folder in place of': FOLDER,
    'a link to nothing in place of': LINK,
    'empty': b'',
    'binary': b'\xff\x00\xfe' * 50,
    'a list': b'[]',
    'an empty object': b'{}',
    'null': b'null\n',
    'a number beyond measure': b'{"step": 1e999, "began": NaN, "labels": ' + b'9' * 5000 + b'}',
    'nested deeply': b'[' * 100_000,
    'lines of no meaning': b'3\n"x"\n[[]]\n{"id": 3}\n{"step": []}\n\n{',
}
LONGER = b'{"step": 3, "id": "x", "began": 7, "query"'


def damages(whole):
    """Yield (what is wrong, {path: content or what is in place of it}) of a whole run."""
    files = sorted(path.relative_to(whole) for path in whole.rglob('*') if path.is_file())
    settings = [path for path in files if path.name.endswith('hparams.json')]
    yield 'no file at all', dict.fromkeys(files, GONE)
    yield 'no settings', dict.fromkeys(settings, GONE)
    yield 'only the settings', dict.fromkeys(set(files) - set(settings), GONE)
    yield 'no tb/', {Path('tb'): GONE}
    yield 'a file in place of tb/', {Path('tb'): b'x'}
    each = []
    for path in files:
        content = (whole / path).read_bytes()
        cut = {'half': content[: len(content) // 2], 'longer': content + LONGER}
        for what, change in {**cut, **OTHER_CONTENT}.items():
            each.append((f'{what} {path}', {path: change}))
    yield from randoms.Random(0).sample(each, COPIES - 5)


def put(place, content):
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink()
    if content == FOLDER:
        place.mkdir()
    elif content == LINK:
        place.symlink_to('nowhere')
    elif content != GONE:
        place.write_bytes(content)


def damaged_copies(whole, place):
    """Yield (what is wrong, path) of damaged copies of a run, one at a time."""
    for number, (what, change) in enumerate(damages(whole)):
        copy = place / f'damaged_{number}'
        shutil.copytree(whole, copy)
        for path, content in change.items():
            put(copy / path, content)
        yield what, copy
        shutil.rmtree(copy, ignore_errors=True)


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    return make_two_runs(tmp_path_factory.mktemp('runs'))


def page_of(run):
    return page.page([str(run)], EXPERIMENTS)


def cards_of(run):
    found, cards = read_run(str(run)), []
    for has_policy in (True, False):
        page.write_card(str(run.parent), found, str(run), has_policy=has_policy, constant=0.0)
        cards.append((run.parent / 'README.md').read_text())
    return cards


@pytest.mark.parametrize('name', ['amber', 'birch'])
def test_a_page_tells_what_is_left_of_a_run(runs, tmp_path, monkeypatch, name):
    """Or a line says why there is none. So do the cards of its models."""
    chart = page.training_chart  # takes a third of a second, and looks at the logs alone
    monkeypatch.setattr(
        page, 'training_chart', lambda named: chart(named) if 'tb/' in what else Markup()
    )
    what = 'tb/ of the whole run'
    whole = words_of(page_of(runs[name]))
    pages, cards = {}, set()
    for what, run in damaged_copies(runs[name], tmp_path):
        try:
            cards.update(card.replace(run.name, name) for card in cards_of(run))
            text = page_of(run)
        except UserError as e:
            assert str(run) in str(e) and '\n' not in str(e), what
            assert 'hparams.json' in what or 'no ' in what or 'only' in what
            continue
        except Exception as e:
            raise AssertionError(what) from e
        assert problems(text) == [], what
        pages[what] = words_of(text).replace(run.name, name)
    assert 'Cannot be read: tb/ppo' in pages['no tb/']
    assert len(pages) > COPIES / 3 and len(cards) > COPIES / 3
    assert all('\n## Versions\n' in card for card in cards)
    assert sum(words != whole for words in pages.values()) > COPIES / 3


# Codes of characters, code in texts, and long texts have elements of their own.
MARKS = {
    ('bdi', 'class', 'tabindex'),
    ('span', 'class'),
    ('span', 'aria-label', 'class', 'dir', 'role', 'tabindex'),
}


def test_texts_of_others_stay_text(tmp_path, monkeypatch):
    """Short ones are tried together, as a page takes a while."""
    monkeypatch.setattr(page, 'training_chart', lambda named: Markup())
    monkeypatch.setattr(os, 'fsync', lambda file: None)
    short = [text for text in HOSTILE.values() if 0 < len(text) < 200]
    together = [' '.join(short[start::4]) for start in range(4)]
    texts = [*together, *(text for text in HOSTILE.values() if text not in short)]
    harmless = markup_of(page_of(write_hostile_run(tmp_path / 'harmless', 'a word')))
    for number, text in enumerate(texts):
        found = page_of(write_hostile_run(tmp_path / str(number), text))
        assert problems(found) == [], text[:200]
        assert markup_of(found) - harmless <= MARKS, text[:200]
        assert text == '' or harmless <= markup_of(found), text[:200]
        assert len(found) < 500_000, text[:200]
