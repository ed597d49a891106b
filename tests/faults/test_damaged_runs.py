"""Runs that are damaged or half written, and texts that are markup: a page tells what is left."""

import pytest
from damaged_runs import damaged_copies
from hostile_texts import HOSTILE, write_hostile_run
from page_rules import markup_of, problems, words_of
from run_folders import EXPERIMENTS
from three_runs import make_three_runs

from lm_human_preferences.errors import UserError
from lm_human_preferences.report_page import render

COPIES = 34  # of each run


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    return make_three_runs(tmp_path_factory.mktemp('runs'))


def page_of(run):
    return render.page([str(run)], EXPERIMENTS, render.Asked())


@pytest.mark.parametrize('name', ['amber', 'birch', 'cedar'])
def test_a_page_tells_what_is_left_of_a_run(runs, tmp_path, name):
    """Or a line says why there is none."""
    whole = words_of(page_of(runs[name]))
    pages = {}
    for seed, (what, run) in enumerate(damaged_copies(runs[name], tmp_path, COPIES)):
        try:
            page = page_of(run)
        except UserError as e:
            assert str(run) in str(e) and '\n' not in str(e), what
            assert 'hparams.json' in what or 'no ' in what or 'only' in what
            continue
        except Exception as e:
            raise AssertionError((what, seed)) from e
        assert problems(page) == [], what
        pages[what] = words_of(page).replace(run.name, name)
    assert 'Its log is not at hand.' in pages['no tb/']
    assert len(pages) > COPIES / 2
    assert sum(words != whole for words in pages.values()) > COPIES / 3


def test_texts_of_others_stay_text(tmp_path):
    harmless = markup_of(page_of(write_hostile_run(tmp_path / 'harmless', 'a word')))
    for number, (what, text) in enumerate(HOSTILE.items()):
        page = page_of(write_hostile_run(tmp_path / str(number), text))
        assert problems(page) == [], what
        assert markup_of(page) <= harmless, what
        assert len(page) < 500_000, what
