"""Answering the questions of a folder in a terminal: one key chooses and goes on."""

from __future__ import annotations

import re
import shutil
import time
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

import click

from lm_human_preferences.commands import serve_page
from lm_human_preferences.commands.keys import Keys, keys_at_once
from lm_human_preferences.errors import UserError, option_renamed
from lm_human_preferences.hparams.labelling_options import LabelHParams, WebHParams
from lm_human_preferences.label_types import TIE_KEY, Value
from lm_human_preferences.labels import simulated_labeller
from lm_human_preferences.labels.answers import LONGEST_REMARK, REASONS, Answer, clean_remark
from lm_human_preferences.labels.folder import LabelFolder, Question
from lm_human_preferences.labels.labeller import AlreadyUsed, Labeller
from lm_human_preferences.labels.page.key import folder_key
from lm_human_preferences.language import tokenisers
from lm_human_preferences.utils.terminal import printable

WIDEST = 80  # columns that a question takes
MOST_CHOICES = 9  # there is a key for each
GUARD_SECONDS = 0.25  # in which a key was meant for the question before, as on the page
UNDO = ('u', '\x7f', '\b')  # the latter two are what backspace sends
ENTER = ('\r', '\n')
HELP_KEYS = ('h', '?')
REASON_OF = {str(number): reason for number, reason in enumerate(REASONS, start=1)}
HELP = """\
s  skip this question, with a reason
c  add a remark, one line of text, to your answer
u  (or backspace) take back your last answer and answer again
h  show this
q  leave; every answer is saved already"""
REVIEW_HELP = """\
   your decision counts instead of the answers below the question
s  leave this question for later
c  add a remark, one line of text, to your decision
u  (or backspace) take back your last decision and decide again
h  show this
q  leave; every decision is saved already"""


def label(
    folder: str,
    labeller: str,
    web: dict[str, Any] | None = None,
    simulate: dict[str, Any] | None = None,
    review: bool = False,
) -> None:
    """Have a labeller answer the questions of a folder; the whole of `./launch.py label`.

    web: options of the page, which serves several labellers. simulate: options of the simulated
    labeller, who answers instead of a person. review: whether the labeller decides what others
    disagree about.
    """
    if web is not None:
        options = LabelHParams(labeller=labeller, web=WebHParams(**web))
        serve_page.serve(folder, options)
        return
    opened = LabelFolder(folder)
    judge = None
    if simulate is not None:
        simulate = dict(simulate)
        judge = _judge(opened, simulate.pop('reward'))
    # A simulated labeller sees nothing, and its answers depend on the seed alone.
    key = folder_key(folder) if judge is None else None
    with Labeller(opened, labeller, key.order if key else None, decides=review) as writer:
        for note in key.notes if key else ():
            click.echo(note, err=True)
        if writer.dropped:
            click.echo(
                f'note: an unfinished answer of {writer.dropped} bytes was dropped', err=True
            )
        for note in opened.notes():
            click.echo(note, err=True)
        if judge is None or simulate is None:
            session = Review if review else Session
            with keys_at_once():
                session(writer, Keys()).run()
            return
        count = simulated_labeller.simulate(writer, judge, **simulate)
        click.echo(f'{labeller} (simulated) has given {count} answers')


def _judge(folder: LabelFolder, reward: str) -> simulated_labeller.Judge:
    """The judge of the simulated labeller. reward: see rewards.load_reward_model."""
    # They load torch, which people need not wait for.
    from lm_human_preferences.commands.sample_policy import warnings_only
    from lm_human_preferences.rewards import load_reward_model
    from lm_human_preferences.synthetic.known_judge import judge_by

    chat = bool(folder.task['task'].get('chat'))
    with option_renamed('--simulate.reward'), warnings_only():
        return judge_by(load_reward_model(reward, folder.encoding(), chat=chat))


class Session:
    """One sitting of a labeller at a terminal."""

    help, keys_shown = HELP, 's skip, c remark, u undo, h help, q leave'

    def __init__(self, labeller: Labeller, keys: Keys) -> None:
        self.labeller, self.keys = labeller, keys
        self.folder: LabelFolder = labeller.folder
        self.label_type = self.folder.label_type
        self.control = self.label_type.control
        encoder = self.folder.encoding().get_encoder()
        self.encoder = tokenisers.reader(encoder, self.folder.task['task'].get('chat'))
        self.columns = min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns)
        self.given = 0
        self.pressed: list[int] = []  # so far, of an answer that takes several keys
        self.remark = ''  # to the question that is shown
        self.begin = self._shown_at = time.monotonic()
        if self.control.choices > MOST_CHOICES:
            raise UserError(
                f'{self.folder.path} shows {len(self.folder.samples)} samples at once: a terminal'
                f' has keys for {MOST_CHOICES}'
            )

    def run(self) -> None:
        """Ask until the labeller leaves."""
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
        """Wait until there is a question: a new one, or one whose answer is taken back."""
        click.echo(self._nothing_left())
        click.echo('u undo your last answer, q or Enter leave, any other key: look again')
        while self.labeller.next_question() is None:
            key = self._key()
            if key in ENTER:
                raise _Leave
            if key in UNDO:
                self._undo()
            elif key in HELP_KEYS:
                self._show_help()

    def _nothing_left(self) -> str:
        return 'Nothing is left for you to answer.'

    def _ask(self, question: Question) -> None:
        """Show a question until it is answered, skipped, or left for the one before."""
        try:
            tokens = self.folder.tokens(question)
        except UserError as e:
            click.echo(f'note: {e}; it is left out', err=True)
            self.labeller.leave_out(question)
            return
        order = self.labeller.order(question)
        self.pressed, self.remark = [], ''
        self._show(question, tokens, order)
        begin = self._shown_at
        while True:
            key = self._key()
            is_part = self._is_part_of_answer(key)
            if (is_part or key in ('s', 'c')) and self._is_too_soon():
                continue
            if is_part:
                self.pressed.append(int(key))
                if len(self.pressed) == self.control.keys:
                    value = self.label_type.answer_of(self.pressed, order)
                    seconds = time.monotonic() - begin
                    self.labeller.answer(question, value, seconds, remark=self.remark)
                    self.given += 1
                    return
                self._show_pressed()
            elif key == 's':
                if self._skip(question, begin):
                    return
                self._show(question, tokens, order)
                click.echo('Not skipped: that key stands for none of the reasons.')
            elif key == 'c':
                self._ask_remark()
            elif key in UNDO and self.pressed:
                self.pressed.pop()
                self._show_pressed()
            elif key in UNDO and self._undo() is not None:
                return
            elif key in HELP_KEYS:
                self._show_help()
                self._show(question, tokens, order)

    def _is_part_of_answer(self, key: str) -> bool:
        """Whether a key is the answer, or the next of several that make one."""
        is_number = re.fullmatch('[0-9]', key) is not None
        return is_number and self.control.accepts([*self.pressed, int(key)])

    def _is_too_soon(self) -> bool:
        """Whether a key can only have been meant for the question before."""
        return self.keys.are_pressed and time.monotonic() - self._shown_at < GUARD_SECONDS

    def _key(self) -> str:
        """The next key in lower case; _Leave if the labeller leaves."""
        try:
            key = self.keys.next().lower()
        except (EOFError, KeyboardInterrupt):
            raise _Leave from None
        if key == 'q':
            raise _Leave
        return key

    def _skip(self, question: Question, begin: float) -> bool:
        """Ask why, and record it; False if the labeller changes their mind."""
        click.echo('Why? Any other key: do not skip')
        for key, reason in REASON_OF.items():
            click.echo(f'{key}  {reason}')
        key = self._key()
        if key not in REASON_OF:
            return False
        seconds = time.monotonic() - begin
        reason = REASON_OF[key]
        self.labeller.answer(question, None, seconds, reason=reason, remark=self.remark)
        return True

    def _ask_remark(self) -> None:
        """Have a remark typed, which is kept with the answer to this question."""
        click.echo(
            f'Your remark, up to {LONGEST_REMARK} characters, and Enter (nothing: no remark)'
        )
        try:
            self.remark = clean_remark(self.keys.line()) or ''
        except (EOFError, KeyboardInterrupt):
            raise _Leave from None
        self._show_remark()

    def _show_remark(self) -> None:
        click.echo(f'remark: {printable(self.remark)}' if self.remark else 'no remark')

    def _undo(self) -> Answer | None:
        try:
            answer = self.labeller.undo()
        except AlreadyUsed as e:
            click.echo(f'{e}.')
            return None
        if answer is None:
            click.echo('There is no answer to take back.')
        else:
            self.given = max(0, self.given - 1)
        return answer

    # ------------------------------------------------------------ what is shown

    def _show_help(self) -> None:
        for paragraph in self.folder.task['instructions'].splitlines():
            for line in _wrapped(printable(paragraph.expandtabs()), self.columns):
                click.echo(line)
        click.echo(f'{self._choices()}\n{self.help}\n')

    def _choices(self) -> str:
        """What the keys of an answer mean."""
        choices = f'1-{self.control.choices}  {self.control.meaning}'
        return f'{choices}\n{TIE_KEY}    {self.control.tie}' if self.control.tie else choices

    def _show(self, question: Question, tokens: dict[str, list[int]], order: Sequence[int]) -> None:
        click.echo('=' * self.columns)
        click.echo(self._progress())
        click.echo()
        self._show_text('', tokens['query'])
        for number, index in enumerate(order, start=1):
            click.echo('-' * self.columns)
            mark = f'{number}  ' if len(order) > 1 else ''
            self._show_text(mark, tokens[self.folder.samples[index]])
        click.echo('-' * self.columns)
        self._show_others(question, order)
        first = TIE_KEY if self.control.tie else 1
        click.echo(f'{first}-{self.control.choices} answer, {self.keys_shown}')
        if self.pressed:
            self._show_pressed()
        if self.remark:
            self._show_remark()
        self._shown_at = time.monotonic()

    def _show_others(self, question: Question, order: Sequence[int]) -> None:
        """Show what others have said, where that is no secret."""

    def _show_pressed(self) -> None:
        """Show what is there of an answer that takes several keys."""
        numbers = ' '.join(map(str, self.pressed)) or 'nothing'
        click.echo(f'so far: {numbers} (u takes back the last one)')

    def _progress(self) -> str:
        seconds = time.monotonic() - self.begin
        rate = f'{60 * self.given / seconds:.0f} a minute' if self.given > 1 else ''
        left, done = self.labeller.left(), self.labeller.done()
        return ', '.join(filter(None, [f'{done} done', f'{left} to go', rate]))

    def _show_text(self, mark: str, tokens: Sequence[int]) -> None:
        """A text, its line ends visible, and everything that could change the terminal escaped."""
        padding = self.encoder.padding_token
        text = self.encoder.decode([token for token in tokens if token != padding])
        lines = [printable(line) for line in text.split('\n')]
        marked = [*(f'{line}⏎' for line in lines[:-1]), lines[-1]]
        for number, line in enumerate(marked):
            for part, wrapped in enumerate(_wrapped(line, self.columns - len(mark))):
                is_first = number == part == 0
                click.echo((mark if is_first else ' ' * len(mark)) + wrapped)


class Review(Session):
    """One sitting of somebody who decides what labellers disagree about."""

    help, keys_shown = REVIEW_HELP, 's later, c remark, u undo, h help, q leave'

    def _nothing_left(self) -> str:
        for_later = self.labeller.left()
        if for_later:
            return f'All are decided but {for_later}, which you have left for later.'
        return 'Nothing is left that labellers disagree about.'

    def _skip(self, question: Question, begin: float) -> bool:
        """Leave the question to a later sitting."""
        self.labeller.leave_out(question)
        return True

    def _show_others(self, question: Question, order: Sequence[int]) -> None:
        for answer in self.folder.answers_to(question):
            said = f'skipped: {answer.reason}'
            if answer.value is not None:
                said = self._as_pressed(answer.value, order)
            remark = f' ({answer.remark})' if answer.remark else ''
            line = printable(f'{answer.labeller}: {said}{remark}')
            for part in _wrapped(line, self.columns):
                click.echo(part)
        click.echo('-' * self.columns)

    def _as_pressed(self, value: Value, order: Sequence[int]) -> str:
        """An answer by the numbers on this screen."""
        if isinstance(value, list):
            return ' '.join(str(order.index(sample) + 1) for sample in value)
        for number in range(TIE_KEY, self.control.choices + 1):
            is_choice = self.control.accepts([number])
            if is_choice and self.label_type.answer_of([number], order) == value:
                return str(number)
        return str(value)  # which no key gives: it was given elsewhere


class _Leave(Exception):
    """The labeller leaves."""


def _width(character: str) -> int:
    """Columns that a character takes."""
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in 'WF' else 1


def _wrapped(line: str, columns: int) -> Iterator[str]:
    """Yield parts of a line that fit in so many columns, broken at a space where there is one."""
    while True:
        used = 0
        end = len(line)
        for index, character in enumerate(line):
            used += _width(character)
            if used > columns:
                end = index
                break
        if end == len(line):
            yield line
            return
        space = line.rfind(' ', 1, end + 1)
        cut = space + 1 if space > 0 else max(1, end)
        yield line[:cut].rstrip(' ')
        line = line[cut:]
