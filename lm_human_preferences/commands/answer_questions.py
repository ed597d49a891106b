"""Command `label`: ask a folder's questions, in a terminal or on a web page."""

import contextlib
import os
import re
import sys
import termios
import textwrap
import time
import tty
from collections.abc import Iterator, Sequence
from typing import Any

import click

from lm_human_preferences import errors
from lm_human_preferences.errors import UserError, option_renamed
from lm_human_preferences.hparams.command_options import LabelHParams, WebHParams
from lm_human_preferences.label_types.base import BAD_KEY, TIE_KEY
from lm_human_preferences.labels.answers import REASONS, Answer
from lm_human_preferences.labels.folder import LabelFolder, Question
from lm_human_preferences.labels.labeller import Labeller, Refused, names_in
from lm_human_preferences.labels.page.server import LabelServer
from lm_human_preferences.language.texts import tokenisers
from lm_human_preferences.utils import stop_signals
from lm_human_preferences.utils.streams import columns, note, printable

WIDEST = 80  # maximum width of a question in the terminal, in columns
HIGHEST_KEY = 9
REPEAT_SECONDS = 0.5  # a key read again within this time is taken for one held down, and ignored
GUARD_SECONDS = 0.25  # answers within this time are ignored as meant for the previous question
UNDO = ('u', '\x7f', '\b')  # the backspace key sends '\x7f' or '\b'
ENTER = ('\r', '\n')
HELP_KEYS = ('h', '?')
HELP = """\
s  skip this question, with a reason
u  (or backspace) take back your last answer and answer again
h  show this
q  leave; every answer is saved already"""


def label(
    folder: str,
    labeller: str,
    web: dict[str, Any] | None = None,
    simulate: dict[str, Any] | None = None,
) -> None:
    """Have people, or a simulated labeller, answer the questions of a folder."""
    if web is not None:
        options = LabelHParams(labeller=labeller, web=WebHParams(**web))
        serve(folder, options)
        return
    opened = LabelFolder(folder)
    if simulate is not None:
        _simulate(opened, labeller, **simulate)
        return
    with Labeller(opened, labeller) as writer, keys_at_once():
        Session(writer, Keys()).run()


def serve(folder: str, options: LabelHParams) -> None:
    """Serve a folder's page until Ctrl-C, and print a link for each labeller."""
    assert options.web is not None
    names = names_in(options.labeller)
    server = LabelServer(folder, names, options.web, note=note)
    with stop_signals.handled(stop_signals.interrupt, *stop_signals.TO_STOP):
        try:
            width = max(map(len, names))
            for name, link in server.links.items():
                click.echo(f'{name:{width}}  {link}')
            click.echo('Each link is for one labeller, until Ctrl-C ends the page.')
            server.wait()
        except KeyboardInterrupt:
            click.echo()
        finally:
            server.close()
    report = errors.typed('./launch.py labels', os.path.abspath(folder))
    counts = [f'{name} {each.done()}' for name, each in server.service.labellers.items()]
    click.echo(f'Saved: {", ".join(counts)}. The report: {report}')


def _simulate(folder: LabelFolder, labeller: str, reward: str, **options: Any) -> None:
    """Have a simulated labeller answer the questions. reward: see loading.load_reward_model."""
    # Import these modules only for a simulation: they load torch, which takes seconds.
    from lm_human_preferences.commands.sampler import warnings_only
    from lm_human_preferences.labels import simulated
    from lm_human_preferences.reward_sources.loading import load_reward_model

    chat = bool(folder.task['task'].get('chat'))
    with option_renamed('--simulate.reward'), warnings_only():
        model = load_reward_model(reward, folder.encoding(), chat=chat, may_be_code=True)
    with Labeller(folder, labeller) as writer:
        count = simulated.simulate(writer, model.score, **options)
    click.echo(f'{labeller} (simulated) has given {count} answers')


@contextlib.contextmanager
def keys_at_once() -> Iterator[None]:
    """Within the block, deliver each key at once, without Enter, and do not echo it."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


class Keys:
    """Keys pressed on a terminal, or characters of a pipe; EOFError at the end of the pipe."""

    def __init__(self) -> None:
        self.are_pressed = sys.stdin.isatty()
        self._waiting: list[str] = []
        self._last, self._when = '', 0.0  # the key read last, and when it was read

    def next(self) -> str:
        """Return the next key, or '' for an arrow or function key; KeyboardInterrupt for Ctrl-C."""
        while True:
            if not self._waiting:
                self._waiting = self._read()
            key, now = self._waiting.pop(0), time.monotonic()
            is_held = key == self._last and now - self._when < REPEAT_SECONDS
            self._last, self._when = key, now
            if not (self.are_pressed and is_held):
                return key

    def _read(self) -> list[str]:
        if not self.are_pressed:
            character = sys.stdin.read(1)
            while character == '\n':  # skip newlines that are typed between keys
                character = sys.stdin.read(1)
            if not character:
                raise EOFError
            return [character]
        pressed = click.getchar()
        # An arrow key sends several characters, and so do several keys pressed at once.
        return [''] if pressed.startswith('\x1b') else list(pressed)


class Session:
    """One sitting of a labeller at a terminal."""

    def __init__(self, labeller: Labeller, keys: Keys) -> None:
        self.labeller, self.keys = labeller, keys
        self.folder: LabelFolder = labeller.folder
        self.label_type = self.folder.label_type
        self.control = self.label_type.control
        encoder = self.folder.encoding().get_encoder()
        self.encoder = tokenisers.for_people(encoder, self.folder.task['task'].get('chat'))
        self.columns = columns(WIDEST)
        self.given = 0
        self._shown_at = time.monotonic()
        has_keys = self.control.first >= 0 and self.control.last <= HIGHEST_KEY
        if not has_keys or self.control.keys > 1:
            raise UserError(
                f'{self.folder.path}: in a terminal, an answer is one key from 0 to {HIGHEST_KEY},'
                ' but these questions need other answers; give --web on'
            )

    def run(self) -> None:
        """Ask questions until the labeller leaves."""
        if not self.labeller.done():
            self._show_help()
        try:
            while True:
                question = self.labeller.next_question()
                if question is None:
                    self._rest()
                else:
                    self._ask(question)
        except _Leave:
            click.echo()
        finally:
            total = self.labeller.done()
            click.echo(f'Saved: {self.given} answers in this sitting, {total} in all')

    def _rest(self) -> None:
        """Wait until a question is open: a new question, or one whose answer is taken back."""
        click.echo('Nothing is left for you to answer.')
        click.echo('u undo your last answer, q or Enter leave, any other key: look again')
        while self.labeller.next_question() is None:
            key = self._key()
            if key in ENTER:
                raise _Leave
            if key in UNDO:
                self._undo()
            elif key in HELP_KEYS:
                self._show_help()

    def _ask(self, question: Question) -> None:
        """Show a question until it is answered or skipped, or an earlier answer is taken back."""
        tokens = question.tokens()
        order = self.labeller.order(question)
        self._show(tokens, order)
        begin = self._shown_at
        while True:
            key = self._key()
            numbers = [int(key)] if re.fullmatch('[0-9]', key) else []
            is_answer = numbers != [] and self.control.accepts(numbers)
            since_shown = time.monotonic() - self._shown_at
            is_too_soon = self.keys.are_pressed and since_shown < GUARD_SECONDS
            if is_too_soon and (is_answer or key == 's'):
                continue  # the key was meant for the previous question
            if is_answer:
                value = self.label_type.answer_of(numbers, order)
                seconds = time.monotonic() - begin
                is_bad = self.control.is_bad(numbers)
                self.labeller.answer(question, value, seconds, is_bad=is_bad)
                self.given += 1
                return
            if key == 's':
                if self._skip(question, begin):
                    return
                self._show(tokens, order)
            elif key in UNDO and self._undo() is not None:
                return
            elif key in HELP_KEYS:
                self._show_help()
                self._show(tokens, order)

    def _key(self) -> str:
        """Return the next key in lower case; raise _Leave if the labeller leaves."""
        try:
            key = self.keys.next().lower()
        except (EOFError, KeyboardInterrupt):
            raise _Leave from None
        if key == 'q':
            raise _Leave
        return key

    def _skip(self, question: Question, begin: float) -> bool:
        """Ask for a reason and record the skip; return False if the labeller does not skip."""
        click.echo('Why? Any other key: do not skip')
        reasons = {str(number): reason for number, reason in enumerate(REASONS, start=1)}
        for key, reason in reasons.items():
            click.echo(f'{key}  {reason}')
        reason = reasons.get(self._key())
        if reason is None:
            return False
        seconds = time.monotonic() - begin
        self.labeller.answer(question, None, seconds, reason=reason)
        return True

    def _undo(self) -> Answer | None:
        try:
            answer = self.labeller.undo()
        except Refused as e:
            click.echo(f'{e}.')
            return None
        if answer is None:
            click.echo('No answer to take back.')
        else:
            self.given = max(0, self.given - 1)
        return answer

    def _show_help(self) -> None:
        for paragraph in self.folder.task['instructions'].splitlines():
            click.echo(textwrap.fill(printable(paragraph.expandtabs()), self.columns))
        click.echo(f'{self.control.first}-{self.control.last}  {self.control.meaning}')
        for number, meaning in ((TIE_KEY, self.control.tie), (BAD_KEY, self.control.bad)):
            if meaning:
                click.echo(f'{number}    {meaning}')
        click.echo(f'{HELP}\n')

    def _show(self, tokens: dict[str, list[int]], order: Sequence[int]) -> None:
        click.echo('=' * self.columns)
        click.echo(f'{self.labeller.done()} done, {self.labeller.left()} to go')
        click.echo()
        self._show_text('', tokens['query'])
        for number, index in enumerate(order, start=1):
            click.echo('-' * self.columns)
            mark = f'{number}  ' if len(order) > 1 else ''
            self._show_text(mark, tokens[self.folder.samples[index]])
        click.echo('-' * self.columns)
        numbers = f'{TIE_KEY if self.control.tie else self.control.first}-{self.control.last}'
        more = f' or {BAD_KEY}' if self.control.bad else ''
        click.echo(f'{numbers}{more} answer, s skip, u undo, h help, q leave')
        self._shown_at = time.monotonic()

    def _show_text(self, mark: str, tokens: Sequence[int]) -> None:
        """Print a text with visible line ends, and with control characters escaped."""
        text = self.encoder.decode(self.encoder.without_padding(tokens))
        text = '⏎\n'.join(map(printable, text.split('\n')))
        for line in text.split('\n'):
            for part in textwrap.wrap(line, self.columns - len(mark)) or ['']:
                click.echo(mark + part)
                mark = ' ' * len(mark)


class _Leave(Exception):
    """Exception raised when the labeller leaves."""
