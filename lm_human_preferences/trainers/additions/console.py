"""Console output of trainings; with --run.console original, most of it is left out."""

import os
import shlex
import textwrap
from collections.abc import Mapping

import torch

from lm_human_preferences import errors, storage
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.hparams import policy_options
from lm_human_preferences.hparams.policy_options import NEW_MODEL, differences
from lm_human_preferences.runs.run_settings import OWN_REWARD
from lm_human_preferences.utils import hyperparams, streams
from lm_human_preferences.utils.hyperparams import HParams
from lm_human_preferences.utils.logging import announce, console_is, log_in_summary
from lm_human_preferences.utils.streams import columns

WIDEST = 100  # largest width of a paragraph, in columns


def dump(hparams: HParams, name: str = 'hparams') -> None:
    """Print `hparams` as the original did, but only with --run.console original."""
    if console_is('original'):
        with streams.lost_output_is_reported():
            hyperparams.dump(hparams, name=name)


def show_start(hparams: policy_options.Training, comm: Comm) -> None:
    """Print the command, its ranks and device, the place where it saves, and its settings."""
    run = hparams.run
    device = 'GPU' if torch.cuda.is_available() else 'CPU'
    ranks = f'{comm.size} ranks on {device}s' if comm.size > 1 else f'1 rank on a {device}'
    where = 'not saved, because --save_dir is None'
    if run.save_dir is not None:
        where = f'saving to {run.save_dir}'
    log_in_summary(f'{hparams.command}: {ranks}, {run.precision}, {where}')
    show_settings(hparams)


def show_settings(hparams: policy_options.Training) -> None:
    """Print the settings that differ from the defaults, in one paragraph per group."""
    changed = differences(hparams, type(hparams)())
    if hparams.policy is not None and hparams.new_reward_model is not None:
        changed.pop(OWN_REWARD, None)
    groups: dict[str, list[str]] = {}
    for name, value in changed.items():
        if value == 'on' and any(other.startswith(f'{name}.') for other in changed):
            continue
        group, _, leaf = name.rpartition('.')
        groups.setdefault(group, []).append(f'{leaf}={value!r}')
    log_in_summary('settings (--dry_run prints all, also those that have their defaults):')
    for group, settings in groups.items():
        paragraph = textwrap.wrap(
            '  '.join(settings),
            columns(WIDEST) - 1,
            initial_indent=f'  {group}: ' if group else '  ',
            subsequent_indent='    ',
            break_long_words=False,
            break_on_hyphens=False,
        )
        log_in_summary(*paragraph)


def announce_next(*lines: str, **commands: str) -> None:
    """Print `lines`, then the commands to try next, each after its purpose (_ becomes a space)."""
    if console_is('original'):
        return
    width = max(map(len, commands), default=0) + 1
    next_lines = []
    for purpose, command in commands.items():
        label = purpose.replace('_', ' ') + ':'
        next_lines.append(f'  {label:{width}} {errors.typed(command)}')
    announce('', *lines, *next_lines)


def announce_policy(hparams: policy_options.HParams) -> None:
    """Print where the policy is saved, and commands to try next; nothing if it is not saved."""
    save_dir = hparams.run.save_dir
    if save_dir is None:
        return
    path = shlex.quote(save_dir)
    commands = {'sample_from_it': f'./sample.py sample --save_dir {path} --nsamples 8'}
    if not hparams.run.evaluate:
        function = hparams.rewards.function
        more = [] if function is None else errors.option_words('rewards.function', function)
        commands['evaluate_it'] = shlex.join(['./launch.py', 'evaluate', save_dir, *more])
    commands['write_a_report'] = f'./launch.py report {path}'
    announce_next(f'The policy is in {storage.join(save_dir, "policy")}', **commands)


def announce_reward_model(
    save_dir: str | None,
    experiment: str | None,
    task_options: Mapping[str, object],
    held_out: object | None,
) -> None:
    """Print a command that trains a policy. task_options: {option: value} to add to the command."""
    if save_dir is not None:
        words = [os.path.basename(save_dir.rstrip('/'))]
        for option, value in task_options.items():
            words += errors.option_words(option, value)
        announce_next(
            f'The reward model is in {storage.join(save_dir, "reward_model")}',
            train_a_policy=(
                f'./launch.py train_policy {experiment or "EXPERIMENT"} {shlex.join(words)}'
                f' --{NEW_MODEL} off --rewards.trained_model {shlex.quote(save_dir)}'
            ),
        )
    if held_out is not None and not console_is('original'):
        announce(f'Held-out labels: {held_out}')
