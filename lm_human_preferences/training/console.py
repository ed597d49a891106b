"""What a training tells the person at the console: its settings first, then a table that grows, at
the end what next.

`--run.console original` prints what the original printed instead, and `quiet` only warnings, errors
and the end.
"""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import HParams
from lm_human_preferences.utils.logging import announce, console_is, say_in_summary

if TYPE_CHECKING:
    from lm_human_preferences.hparams import train_policy, train_reward
    from lm_human_preferences.language.encodings import Encoder

WIDEST = 100  # columns of a paragraph, where the terminal has more
NEW_MODEL = 'rewards.train_new_model'
SAMPLES_SHOWN, SAMPLES_IN_SUMMARY = 3, 2


class Table:
    """A table that is printed line by line, its head before the first.

    columns: {head: (width, format of a number)}; a head is the name of a value, with spaces for
    underscores and /s for _per_second.
    """

    def __init__(self, columns: dict[str, tuple[int, str]]) -> None:
        self.columns = columns
        self.has_head = False

    def add(self, **values: float | str) -> None:
        """Print a line: a value for each column."""
        if not self.has_head:
            say_in_summary(
                '', ' '.join(f'{head:>{width}}' for head, (width, _) in self.columns.items())
            )
            self.has_head = True
        cells = []
        for head, (width, form) in self.columns.items():
            value = values[head.replace(' ', '_').replace('/s', '_per_second')]
            text = value if isinstance(value, str) else format(value, form)
            cells.append(f'{text:>{width}}')
        say_in_summary(' '.join(cells))


def reward_table() -> Table:
    """Of the training of a reward model."""
    return Table(
        {
            'step': (11, ''),
            'labels': (9, ''),
            'loss': (8, '.3f'),
            'labels/s': (9, '.0f'),
            'time left': (9, ''),
        }
    )


def policy_table() -> Table:
    """Of the training of a policy; score and KL are those of the present step."""
    return Table(
        {
            'step': (11, ''),
            'episodes': (9, ''),
            'score': (7, '.2f'),
            'KL': (6, '.2f'),
            'KL coef': (8, '.4g'),
            'loss': (7, '.3f'),
            'episodes/s': (10, '.0f'),
            'time left': (9, ''),
        }
    )


def is_due(step: int, last: int, interval: int) -> bool:
    """Whether there is a line of the table after `step` of `last` steps: the first, each
    `interval`-th, the last."""
    return step in (1, last) or step % interval == 0


def show_start(
    command: str,
    hparams: train_policy.HParams | train_reward.HParams,
    comm: Comm,
) -> None:
    """Say what starts, where, and with which settings; hparams: of `command`, train_policy or
    train_reward."""
    run = hparams.run
    device = 'GPU' if torch.cuda.is_available() else 'CPU'
    ranks = f'1 rank on a {device}' if comm.size == 1 else f'{comm.size} ranks on {device}s'
    record = None
    where = 'not saved, because --save_dir is None'
    if run.save_dir is not None:
        where = f'saving to {run.save_dir}'
        record = f'{command}_hparams.json there'
    say_in_summary(f'{command}: {ranks}, {run.precision}, {where}')
    show_settings(hparams, record)


def show_settings(hparams: HParams, record: str | None) -> None:
    """Print the settings that differ from the defaults, a paragraph for each group; record: file
    that holds them all."""
    groups: dict[str, list[str]] = {}
    unchanged = 0
    for name, value, default in _leaves(hparams):
        if value == default:
            unchanged += 1
            continue
        group = NEW_MODEL if name.startswith(f'{NEW_MODEL}.') else name.partition('.')[0]
        leaf = name.removeprefix(f'{group}.')
        if leaf == name:  # train_reward has options without a group
            group = ''
        groups.setdefault(group, []).append(
            f'{leaf}={value!r}' if isinstance(value, str) else f'{leaf}={value}'
        )
    say_in_summary('settings:')
    for group, words in groups.items():
        say_in_summary(*_paragraph(f'{group}: ' if group else '', words))
    where = f'{record} holds them all' if record else '--dry_run prints them all'
    say_in_summary(f'  {unchanged} others have their defaults; {where}')


def _leaves(hparams: HParams, prefix: str = '') -> Iterator[tuple[str, object, object]]:
    """(dotted name, value, default) of every setting; a reward model's task, the same as the
    policy's, only once."""
    for field in dataclasses.fields(hparams):
        value = getattr(hparams, field.name)
        name = prefix + field.name
        if name == f'{NEW_MODEL}.task' or not field.metadata.get('recorded', True):
            continue
        if isinstance(value, HParams):
            yield from _leaves(value, f'{name}.')
        elif hyperparams.group_class(field.type):
            yield name, 'off', 'off'
        else:
            yield name, value, field.default


def _paragraph(head: str, words: list[str]) -> list[str]:
    columns = min(shutil.get_terminal_size((WIDEST, 24)).columns, WIDEST)
    return textwrap.wrap(
        '  '.join(words),
        columns - 1,
        initial_indent=f'  {head}',
        subsequent_indent='    ',
        break_long_words=False,
        break_on_hyphens=False,
    )


def show_samples(
    encoder: Encoder,
    episodes: Sequence[torch.Tensor],
    *,
    step: int,
    total_steps: int,
    is_logged: bool,
    kl_coef: float,
) -> None:
    """Print the first few episodes of PPO step `step`; in a summary, only of the first and last.

    episodes: queries (batch, query_length), responses (batch, response_length), scores (batch,) and
    KL divergences in nats (batch,). is_logged: whether --run.log_interval has this step printed.
    kl_coef: what the divergences were multiplied with.
    """
    in_summary = console_is('summary') and step in (0, total_steps - 1)
    in_original = console_is('original') and is_logged
    if not in_summary and not in_original:
        return
    if in_summary:
        announce(f'samples of step {step + 1}:')
    count = SAMPLES_IN_SUMMARY if in_summary else SAMPLES_SHOWN
    shown = [values[:count].tolist() for values in episodes]
    for query_tokens, response_tokens, score, kl in zip(*shown, strict=True):
        query = encoder.decode(query_tokens).replace('\n', '⏎')
        response = encoder.decode(response_tokens).replace('\n', '⏎')
        if in_summary:
            announce(f'  {query} | {response}   (score {score:.2f}, KL {kl:.2f})')
            continue
        announce(
            query,
            response,
            f'  score = {score:+.2f}',
            f'  kl = {kl:+.2f}',
            f'  total = {score - kl_coef * kl:+.2f}',
        )


def announce_next(*lines: str, **commands: str) -> None:
    """Say at the end what is there now and which commands come next; the original said nothing.

    commands: {what for: command}, '_' in place of spaces.
    """
    if console_is('original'):
        return
    width = max(map(len, commands), default=0) + 1
    next_lines = [
        f'  {purpose.replace("_", " ") + ":":{width}} {command}'
        for purpose, command in commands.items()
    ]
    announce('', *lines, *next_lines)
