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
from three_runs import make_three_runs

from lm_human_preferences.errors import UserError
from lm_human_preferences.report import model_card, page
from lm_human_preferences.report.run import read_run

COPIES = 14  # of each run
# What may stand where JSON, or lines of JSON, should.
OTHER_CONTENT = {
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
GONE, FOLDER, LINK = 'gone', 'folder', 'link'  # what may be in place of a file, beside content


def damages(contents, random):
    """Yield (what is wrong, {path: content or what is in place of it}).

    contents: of the files of a whole run, {path: bytes}. First comes what is left of a run that
    ended before it had written all of them, then each file damaged in each way by chance.
    """
    files = sorted(contents)
    settings = [path for path in files if path.name.endswith('hparams.json')]
    yield 'no file at all', dict.fromkeys(files, GONE)
    yield 'no settings', dict.fromkeys(settings, GONE)
    yield 'only the settings', dict.fromkeys(set(files) - set(settings), GONE)
    for folder in sorted({path.parts[0] for path in files if len(path.parts) > 1}):
        yield f'no {folder}/', {Path(folder): GONE}
        yield f'a file in place of {folder}/', {Path(folder): b'x'}
    for number in range(1, len(files), 2):
        yield f'only {number} files', dict.fromkeys(files[number:], GONE)
    each = [(path, *change) for path in files for change in changes(contents[path])]
    random.shuffle(each)
    for path, what, content in each:
        yield f'{what} {path}', {path: content}


def changes(content):
    yield 'no', GONE
    yield 'a folder', FOLDER
    yield 'a link to nothing', LINK
    yield 'half', content[: len(content) // 2]
    yield 'longer', content + LONGER
    yield from OTHER_CONTENT.items()


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
    """Yield (what is wrong, path) of COPIES damaged copies of a run, one at a time."""
    contents = {
        path.relative_to(whole): path.read_bytes() for path in whole.rglob('*') if path.is_file()
    }
    every = damages(contents, randoms.Random(0))
    for number in range(COPIES):
        what, change = next(every)
        copy = place / f'damaged_{number}'
        shutil.copytree(whole, copy)
        for path, content in change.items():
            put(copy / path, content)
        yield what, copy
        shutil.rmtree(copy, ignore_errors=True)


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    return make_three_runs(tmp_path_factory.mktemp('runs'))


def page_of(run):
    return page.page([str(run)], EXPERIMENTS)


def cards_of(run):
    found = read_run(str(run))
    return [model_card.card(found, str(run), model_card.Use(each)) for each in (True, False)]


@pytest.mark.parametrize('name', ['amber', 'birch', 'cedar'])
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
    assert all('\n## What is not known\n' in card for card in cards)
    assert sum(words != whole for words in pages.values()) > COPIES / 3


# Codes of characters, code in texts, and long texts have elements of their own.
MARKS = {
    ('bdi', 'class', 'tabindex'),
    ('span', 'class'),
    ('span', 'aria-label', 'class', 'dir', 'role', 'tabindex', 'translate'),
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
