"""`./launch.py label`: keys, through a pipe and on a terminal, and what is shown."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

from command_line import error_of, invoke
from label_folders import TASK, make_folder
from label_page import answers_of, places, press

from lm_human_preferences.commands import answer_questions as label_command
from lm_human_preferences.labels.answers import REASONS
from lm_human_preferences.labels.folder import LabelFolder

ROOT = Path(__file__).parents[2]


def test_a_key_chooses_the_sample_that_is_shown_there(path):
    make_folder(path, 8)
    printed = press(path, '12341234')
    assert places(path) == [0, 1, 2, 3, 0, 1, 2, 3]
    # what stood behind the number on the screen is what was recorded
    folder = LabelFolder(str(path))
    shown = re.findall(r'^([1-4])  (\w{4})$', printed, re.MULTILINE)
    letters = 'abcdefghijklmnopqrstuvwxyz.'
    for index, answer in enumerate(answers_of(path)):
        screen = dict(shown[4 * index : 4 * index + 4])
        tokens = folder.questions[answer.question].tokens()[f'sample{answer.value}']
        assert screen[str(index % 4 + 1)] == ''.join(letters[token] for token in tokens)
    assert 'Nothing is left for you to answer.' in printed
    assert 'Saved: 8 answers in this sitting, 8 in all' in printed


def test_the_last_answer_can_be_taken_back(path):
    make_folder(path, 2)
    printed = press(path, '12u4h')
    assert places(path) == [0, 3]
    assert printed.count(TASK['instructions']) == 2  # at first, and after the last answer


def test_questions_that_come_while_nothing_is_left_are_asked(path, monkeypatch):
    make_folder(path, 1)
    left = iter('1x2q')

    def next_key(self):
        key = next(left)
        if key == 'x':
            make_folder(path, 1, seed=1)
        return key

    monkeypatch.setattr(label_command.Keys, 'next', next_key)
    press(path, '')
    assert places(path) == [0, 1]


def test_skip_has_a_reason(path):
    make_folder(path, len(REASONS) + 1)
    press(path, ''.join(f's{key}' for key in range(1, len(REASONS) + 1)) + 'sx3')
    *skipped, answered = answers_of(path)
    assert [answer.reason for answer in skipped] == list(REASONS)
    assert answered.order.index(answered.value) == 2  # digits choose again


def test_instructions_cannot_move_the_cursor(tmp_path):
    instructions = 'Look:\x1b[2J\n\tthe \u202eanswer'
    make_folder(tmp_path / 'f', 1, task={'instructions': instructions})
    printed = press(tmp_path / 'f', 'q')
    assert printed.startswith('Look:\\x1b[2J\n        the \\u202eanswer\n')


def test_mistakes_are_one_line(tmp_path):
    told = error_of(invoke(f'label {tmp_path}/none --labeller a'))
    assert f'; ./launch.py ask EXPERIMENT {tmp_path}/none makes one' in told
    make_folder(tmp_path / 'f')
    assert '--labeller must be given: your name' in error_of(invoke(f'label {tmp_path}/f'))
    error = error_of(invoke(f'label {tmp_path}/f --labeller sim --simulate on'))
    assert 'judges film reviews only' in error
    make_folder(tmp_path / 'ten', samples=10, task={'label_type': 'best_of_10'})
    assert 'an answer is one key from 0 to 9, but these questions need other answers' in error_of(
        invoke(f'label {tmp_path}/ten --labeller a')
    )


class Terminal:
    def __init__(self, path, name='anna'):
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, 'launch.py', 'label', str(path), '--labeller', name],
            cwd=ROOT,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, 'COLUMNS': '80'},
        )
        os.close(slave)
        self.printed = ''

    def wait_for(self, text, count=1):
        deadline = time.monotonic() + 60
        while self.printed.count(text) < count and time.monotonic() < deadline:
            if select.select([self.master], [], [], 1)[0]:
                self.printed += os.read(self.master, 4096).decode(errors='replace')
        assert self.printed.count(text) >= count, self.printed

    def press(self, keys):
        # Click reads by then, so that Ctrl-C is a key, and the question was there long enough.
        time.sleep(label_command.GUARD_SECONDS + 0.15)
        os.write(self.master, keys.encode())

    def end(self):
        status = self.process.wait(30)
        os.close(self.master)
        return status


def test_on_a_terminal_keys_need_no_enter(path):
    make_folder(path, 6)
    terminal = Terminal(path)
    terminal.wait_for('q leave')
    terminal.press('2')
    terminal.wait_for('q leave', 2)
    terminal.press('\x1b[A')  # an arrow
    terminal.press('\x7f')  # backspace
    terminal.wait_for('q leave', 3)
    terminal.press('3s4')  # at one moment: the latter two come too soon to be meant
    terminal.wait_for('q leave', 4)
    terminal.press('1')
    for _ in range(30):  # it is held down
        os.write(terminal.master, b'1')
        time.sleep(0.03)
    terminal.wait_for('q leave', 5)
    terminal.press('\x03')
    terminal.wait_for('Saved: 2 answers in this sitting, 2 in all')
    assert terminal.end() == 0
    assert places(path) == [2, 0]
