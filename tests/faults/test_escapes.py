"""Texts of others that would control the terminal of whoever prints them."""

import io
import json
import sys

from command_line import invoke
from hostile_texts import HOSTILE, write_hostile_run
from label_folders import make_folder
from tqdm import tqdm

import sample
from lm_human_preferences.labels.folder import LabelFolder
from lm_human_preferences.labels.labeller import Labeller
from lm_human_preferences.utils import streams

TITLE = 'a\x1b]0;taken\x07\x1b[2J\x9b31m\rb\x08'
SHOWN = r'a\x1b]0;taken\x07\x1b[2J\x9b31m\rb\x08'
SETTINGS = ['--mpi=1', '--rewards.train_new_model=off', '--rewards.trained_model=test']


def is_plain(result):
    text = result.stdout + result.stderr
    return not any(ord(character) < 32 and character not in '\n\t\r' for character in text) and (
        '\r' not in result.stdout and not {'\x7f', '\x9b'} & set(text)
    )


def terminal_of(monkeypatch):
    """What is written to standard streams as of a terminal, by their name."""
    written = {}
    for name in ('stdout', 'stderr'):
        written[name] = io.BytesIO()
        stream = io.TextIOWrapper(written[name], 'utf-8', write_through=True)
        stream.isatty = lambda: True
        monkeypatch.setattr(sys, name, stream)
    streams.make_safe()
    streams.make_safe()
    return lambda name: written[name].getvalue().decode()


def test_what_is_printed_is_text(monkeypatch):
    terminal = terminal_of(monkeypatch)
    print(TITLE, 'tab\tend', 'nbsp\xa0 👩\u200d👧')
    streams.note(TITLE)
    assert terminal('stdout') == f'{SHOWN} tab\tend nbsp\xa0 👩\u200d👧\n'
    assert terminal('stderr') == f'{SHOWN}\n'
    for text in HOSTILE.values():
        print(text)
    controls = {*map(chr, range(32)), *map(chr, range(127, 160))} - {'\n', '\t'}
    assert not controls & set(terminal('stdout'))


def test_progress_bars_still_move(monkeypatch):
    terminal = terminal_of(monkeypatch)
    with tqdm(total=2, desc=f'outer {TITLE}', mininterval=0) as outer:
        with tqdm(total=2, desc='inner', mininterval=0) as inner:
            inner.update()
        outer.update()
    assert '\x1b[A' in terminal('stderr') and '\rinner' in terminal('stderr')
    assert SHOWN in terminal('stderr') and '\x1b]' not in terminal('stderr')


def test_no_command_prints_an_escape(tmp_path):
    run = tmp_path / 'run'
    run.mkdir()
    write_hostile_run(run, HOSTILE['an escape'])
    around = (f'--task.query_{part}={TITLE}' for part in ('prefix', 'suffix'))
    new = ['train_policy', 'test', 'x', f'--save_dir={tmp_path}/save', *SETTINGS]
    make_folder(tmp_path / 'labels', 2)
    folder = LabelFolder(str(tmp_path / 'labels'))
    with Labeller(folder, 'anna') as labeller:
        labeller.answer(next(iter(folder.questions.values())), 1, 1.0, uuid=TITLE)
    texts = tmp_path / 'texts.jsonl'
    texts.write_text(json.dumps({'query': TITLE, 'sample0': TITLE, TITLE: 'b'}) + '\n')
    words = [
        ['resume', str(run)],
        ['evaluate', str(run)],
        ['report', str(run), f'--output={tmp_path}/report.html'],
        ['score', str(run), str(texts)],
        ['export', str(run), f'{tmp_path}/exported'],
        ['import_labels', 'test', str(texts), f'{tmp_path}/imported'],
        ['labels', f'{tmp_path}/labels'],
        [*new, *around, '--task.query_length=2', '--dry_run'],
    ]
    for each in words:
        result = invoke(each)
        assert is_plain(result), (each, result.output)
    for more in ([], [f'--prompt={TITLE}']):
        assert is_plain(invoke(['sample', f'--save_dir={run}', *more], sample.cli))


def test_names_of_fields_are_no_lines_of_ours(tmp_path):
    forged = 'x\nerror: type `it`\u202e'
    texts = tmp_path / 'texts.jsonl'
    for more in ({}, {forged: [{'role': 'user', 'content': 'b'}]}):
        record = {'prompt': 'abc', 'chosen': 'a', 'rejected': 'b', forged: 'c', **more}
        texts.write_text(json.dumps(record) + '\n')
        words = ['import_labels', 'test', str(texts), f'{tmp_path}/{len(more)}']
        result = invoke([*words, '--labels.type=best_of_2'])
        assert result.exit_code == 0, result.output
        assert r'x\nerror: type `it`\u202e (1)' in result.stdout + result.stderr
