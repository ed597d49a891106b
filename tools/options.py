#!/usr/bin/env python3
"""Write docs/options.md, the tables of all options, from the code.

`pipenv run python tools/options.py` writes it anew; a test compares the page with the code.
"""

import dataclasses
import os
import sys
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
if __name__ == '__main__':
    os.environ.pop('LMHP_SAVE_DIR', None)  # the page shows what is so everywhere

import launch  # noqa: E402
import sample  # noqa: E402
from lm_human_preferences.cli import program, user_settings  # noqa: E402
from lm_human_preferences.datasets import registry  # noqa: E402
from lm_human_preferences.hparams import command_options  # noqa: E402
from lm_human_preferences.utils import hyperparams  # noqa: E402

PAGE = ROOT / 'docs/options.md'
INTRODUCTION = """\
# Options

This page lists all options as `--help` shows them; `pipenv run python tools/options.py` writes it
from the code.

- The defaults are those of the program. Each experiment of [`launch.py`](../launch.py) sets what is
  *required* and changes some of them; `--dry_run` prints the settings that it ends up with. `None`
  means "not set".
- What is `off` is a group of options: `on` and `off` switch it (`--rewards.adaptive_kl off`), and
  setting one of its options switches it on.
- Names may be written with `-` for `_`, values with or without `=`: `--ppo.lr 1e-5`,
  `--ppo.lr=1e-5`. A switch alone is `true`, and with `no` before its name `false`:
  `--noppo.whiten_rewards`. A path may begin with `~`.
- `./launch.py resume SAVE_DIR` takes `--mpi` and the options of the command that started the run,
  of which [few may change](files.md#an-interrupted-run).
"""
NOTES = {  # below a heading
    'Run': (
        '`./launch.py train_reward EXPERIMENT NAME` and `./launch.py train_policy EXPERIMENT NAME`;'
        ' the default of\n`--save_dir` ends in the name of the command. A reward model that'
        ' `train_policy` trains first has its own `seed`,\n`log_interval`, `save_interval`,'
        ' `precision` and `gradient_checkpointing`: `--rewards.train_new_model.run.NAME`.\nThe last'
        " two follow the policy's unless they are set."
    ),
    'Task': (
        'In `train_policy`, a task option also holds for the reward model that is trained first;'
        ' `--lora.NAME` sets other adapters\nfor it.'
    ),
    'Reward training': (
        'These are options of `train_reward`; `train_policy` calls them'
        ' `--rewards.train_new_model.NAME`.'
    ),
    'Rewards': (
        '[evaluation.md](evaluation.md#the-kl-coefficient) says how fast the KL coefficient adapts.'
    ),
    'Sampling': (
        '`./sample.py sample`. With `--model` it also takes the options `--task.NAME`, whose'
        ' defaults are those of the\nexperiment `chat`.'
    ),
    'Asking': (
        '`./launch.py ask EXPERIMENT FOLDER`, see [labelling.md](labelling.md). It also takes'
        ' `--labels.type`, `--labels.too_long` and\nthe options `--task.NAME`.'
    ),
    'Other commands': (
        '`evaluate SAVE_DIR`, `label FOLDER`, `labels FOLDER`, `score RUN FILE`, `report RUN...`'
        ' ([report.md](report.md)),\n`export MODEL_DIR OUTPUT_DIR`, and `import_labels EXPERIMENT'
        ' FILE FOLDER`, which also takes `--labels.type`,\n`--labels.too_long` and the options'
        ' `--task.NAME`. `label` has the options of the [page](#run), too, as\n`--web.NAME`.'
    ),
}
# Small groups, whose options follow those of a larger table
JOINED = {
    'Launching': 'Run',
    'Policy': 'Task',
    'Adapters': 'Task',
    'Labels': 'Reward training',
    'Adaptive KL': 'Rewards',
    'Online labels': 'Rewards',
    'Page for labellers': 'Run',
}


def tables() -> dict[str, program.Fields]:
    """The options by heading, in the order of the page."""
    commands = _commands(launch.cli)
    reward, policy = (
        program.sections(commands[name].fields) for name in ('train_reward', 'train_policy')
    )
    headings = ['Launching', *program.HEADINGS.values()]
    headings.remove('Adapters of a reward model')  # the same as the policy's
    trainings: dict[str, program.Fields] = {}
    for heading in headings:
        fields = (policy if heading in policy else reward)[heading]
        trainings.setdefault(JOINED.get(heading, heading), {}).update(fields)
    return {
        **trainings,
        'Sampling': _without(_commands(sample.cli)['sample'].fields, 'task.'),
        'Asking': user_settings.settable(command_options.AskHParams),
        'Other commands': _of_other_commands(commands),
    }


def _of_other_commands(commands: dict[str, program.Command]) -> program.Fields:
    """The options of commands that have few, by command and option."""
    names = ('evaluate', 'label', 'labels', 'score', 'export', 'report')
    fields = {name: _without(commands[name].fields, 'web.') for name in names}
    fields['import_labels'] = hyperparams.fields(command_options.ImportHParams)
    return {f'{name} --{key}': field for name in fields for key, field in fields[name].items()}


def _without(fields: program.Fields, prefix: str) -> program.Fields:
    """Those that help pages show, but for a group that has a heading of its own."""
    shown = program.shown(fields)
    return {name: field for name, field in shown.items() if not name.startswith(prefix)}


def _commands(group: click.Group) -> dict[str, program.Command]:
    """Those of its commands that have dataclass fields as options, by name."""
    return {
        name: found for name, found in group.commands.items() if isinstance(found, program.Command)
    }


def page() -> str:
    """The whole page as Markdown."""
    parts = [INTRODUCTION]
    for heading, fields in tables().items():
        note = f'{NOTES[heading]}\n\n' if heading in NOTES else ''
        if heading == 'Task':
            note += f'{_datasets()}\n\n'
        rows = '\n'.join(_row(name, field) for name, field in fields.items())
        parts.append(
            f'## {heading}\n\n{note}| option | default | meaning |\n|---|---|---|\n{rows}\n'
        )
    return '\n'.join(parts)


def _datasets() -> str:
    """The data sets of `--task.query_dataset` as a table, from their registry."""
    rows = ['| data set | texts | where they come from |', '|---|---|---|']
    for info in registry.DATASETS.values():
        origin = 'downloaded when first used' if info.downloaded else 'made up by the program'
        if info.labels_stand_in:
            origin += '; where that fails, the queries of the label file stand in'
        rows.append(f'| {info.name} | {info.summary} | {origin} |')
    return '\n'.join(rows)


def _row(name: str, field: dataclasses.Field) -> str:
    default = program.default_text(field)
    shown = 'required' if default is None else f'`{default}`'
    text = field.metadata['help'].replace('|', r'\|')
    option = name if ' --' in name else f'--{name}'
    return f'| `{option}` | {shown} | {text} |'


if __name__ == '__main__':
    PAGE.write_text(page(), encoding='utf-8')
