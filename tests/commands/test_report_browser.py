"""The report of runs in a real browser: all of it can be read, by everybody, and it asks nobody."""

import re

import pytest
from browser import Window, needs_chromium
from hostile_texts import HOSTILE
from page_looks import (
    emulate_paper,
    focused,
    printed,
    sticking_out,
    unnamed,
    unreachable,
    weak_texts,
)
from run_folders import EXPERIMENTS, write_run, write_samples
from two_runs import make_two_runs

from lm_human_preferences.report import page

pytestmark = needs_chromium


def write_page(runs, path):
    path.write_bytes(page.page(runs, EXPERIMENTS).encode(errors='replace'))


@pytest.fixture(scope='module')
def two(tmp_path_factory):
    place = tmp_path_factory.mktemp('runs')
    write_page([str(run) for run in make_two_runs(place).values()], place / 'page.html')
    return (place / 'page.html').as_uri()


@pytest.fixture(scope='module')
def browser():
    window = Window()
    yield window
    window.driver.quit()


@pytest.fixture
def window(browser):
    browser.emulate(1200)
    browser.console(), browser.requests()
    yield browser
    assert browser.console() == []
    others = [url for url in browser.requests() if not url.startswith(('file:', 'about:', 'data:'))]
    assert others == []


def test_all_can_be_read_on_every_screen(window, two):
    for width, scheme in ((375, 'light'), (375, 'dark'), (1200, 'light'), (1200, 'dark')):
        window.emulate(width, 900, scheme)
        window.open(two)
        found = weak_texts(window), sticking_out(window), unreachable(window)
        assert found == ([], [], []), (width, scheme)


def test_long_paths_names_and_hostile_texts_fit_the_screen(window, tmp_path):
    runs = []
    texts = [text for text in HOSTILE.values() if len(text) < 10_000]
    for folder in 'abc':
        place = tmp_path / (folder + 'a-folder-with-a-long-name' * 3) / 'run'
        runs.append(write_run(place, task__query_dataset=f'{place}/queries.jsonl'))
        write_samples(place, {step: [(text, text, 0.5, 9.0) for text in texts] for step in (0, 9)})
    write_page([str(run) for run in runs], tmp_path / 'page.html')
    for width in (375, 1000):
        window.emulate(width, 900)
        window.open((tmp_path / 'page.html').as_uri())
        assert sticking_out(window) == []
    window.emulate(375, 900)
    align = "[...document.querySelectorAll('td')].map(each => getComputedStyle(each).textAlign)"
    assert set(window.script(align)) == {'start'}


def test_all_can_be_read_on_paper(window, two):
    """Also when somebody prints it whose screen is dark. A run takes about four pages."""
    window.open(two)
    emulate_paper(window, 'dark')
    assert weak_texts(window) == []
    pdf = printed(window)
    assert pdf.startswith(b'%PDF') and len(re.findall(rb'/Type\s*/Page\b', pdf)) <= 15


def test_a_keyboard_and_a_screen_reader_come_everywhere(window, two):
    window.open(two)
    _, hidden = focused(window)
    assert hidden == []
    assert unnamed(window) == []
