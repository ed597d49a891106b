"""Commands about labels: ask, import_labels, label, labels, score."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from lm_human_preferences.cli import launch, user_settings
from lm_human_preferences.cli.launch import job_command
from lm_human_preferences.cli.program import Command
from lm_human_preferences.hparams import command_options, policy_options, reward_options
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.combos import Trial

Experiments = Mapping[str, Sequence[Trial]]
# The best of four responses tells more than the better of two, and takes hardly longer to find.
ASKED = {'chat': 'best_of_4'}  # {experiment: label type that `ask` uses by default}
OF_LABELS = 'QUERIES.jsonl'  # placeholder: imported labels have queries, and need no data set
LABEL_FIELDS = {
    key: field
    for key, field in user_settings.settable(reward_options.HParams).items()
    if key in ('labels.type', 'labels.too_long') or key.startswith('task.')
}


HELP: dict[str, dict[str, Any]] = {  # {command: texts of its help page}
    'ask': {
        'example': './launch.py ask mock_sentiment ./my-labels --count 200',
        'help': 'Add questions for people to FOLDER, which is created if it does not exist. They'
        " are queries of the experiment's data set, each with responses of a policy.",
    },
    'import_labels': {
        'example': './launch.py import_labels mock_sentiment pairs.jsonl ./my-labels',
        'help': 'Import labels that are texts into FOLDER. A line of FILE has prompt, chosen and'
        ' rejected, or query, sample0, sample1 and so on, and best.',
    },
    'label': {
        'example': './launch.py label ./my-labels --labeller anna',
        'help': 'Answer the questions in FOLDER, which `ask` has made. One key answers and goes on;'
        ' every answer is saved at once.',
    },
    'labels': {
        'example': './launch.py labels ./my-labels --export my-labels.json',
        'help': 'Show what the labellers of FOLDER have answered and how far they agree, and export'
        ' their labels.',
    },
    'score': {
        'example': './launch.py score /tmp/save/train_reward/my-reward texts.jsonl',
        'help': 'Score texts with the reward model of RUN. Each line of FILE has a query and one'
        ' or more responses; for each line, a JSON object with their scores is printed. FILE - is'
        ' standard input.',
    },
}


def label_commands(
    reward_experiments: Experiments, settings: Callable[[], policy_options.Experiments]
) -> list[Command]:
    """Return the commands that work with labels. reward_experiments: {name: trials} to choose from.

    settings: function that returns all experiments' settings, to suggest the next training command.
    """
    options = command_options
    of_experiment = functools.partial(_experiment_command, reward_experiments, settings)

    def command(name: str, *details: Any, **more: Any) -> Command:
        return job_command(name, *details, **HELP[name], **more)

    return [
        of_experiment('ask', 'commands.ask:ask', options.AskHParams, ['folder']),
        of_experiment(
            'import_labels',
            'commands.texts.import_labels:import_labels',
            options.ImportHParams,
            ['file', 'folder'],
        ),
        command('label', 'commands.answer_questions:label', options.LabelHParams, ['folder']),
        command(
            'labels',
            'commands.report_labels:report_labels',
            options.LabelsHParams,
            ['folder'],
            more=lambda: {'experiments': settings()},
        ),
        command('score', 'commands.texts.score:score', options.ScoreHParams, ['run', 'file']),
    ]


def _asked_type(experiment: str, options: Any, folder: str) -> dict[str, str]:
    """Return {'labels.type': default label type of the command `ask`}, or {} without a default."""
    from lm_human_preferences.labels.folder import is_folder
    from lm_human_preferences.labels.task_file import read_task

    if is_folder(folder):
        return {'labels.type': read_task(folder)['label_type']}
    if experiment in ASKED and options.questions is options.gold is None:
        return {'labels.type': ASKED[experiment]}
    return {}


def _experiment_command(
    reward_experiments: Experiments,
    settings_of_all: Callable[[], policy_options.Experiments],
    name: str,
    job: str,
    hparam_class: type[hyperparams.HParams],
    arguments: Sequence[str],
) -> Command:
    """Return the command `name EXPERIMENT ARGUMENT ...`, which starts `job`.

    Its options are the fields of `hparam_class` and LABEL_FIELDS.
    """

    fields = user_settings.settable(hparam_class)

    def start(settings: dict[str, Any], exp: str, *values: str) -> None:
        """Start `job` with the user's `settings` {option: value} and the `values` of arguments."""
        binds = user_settings.bindings(reward_experiments, exp, name)
        options: Any = hparam_class()
        own = {key: settings.pop(key) for key in fields.keys() & settings.keys()}
        user_settings.override(options, own)
        hparams = reward_options.CommandHParams()
        hparams.override_from_dict(binds)
        if name == 'ask':
            settings = {**_asked_type(exp, options, values[-1]), **settings}
        settings = user_settings.with_end_of_response(settings, hparams.task)
        user_settings.override(hparams, settings)
        if name == 'import_labels' and hparams.task.query_dataset is None:
            hparams.task.query_dataset = OF_LABELS
        texts = values[0] if name == 'import_labels' else options.questions or options.gold
        if texts or hparams.labels.source is None:
            hparams.labels.source = texts or values[-1]
        launch.start_job(
            job,
            {
                'reward_hparams': launch.validated(hparams),
                'experiment': exp,
                'experiments': settings_of_all(),
                **dict(zip(arguments, values, strict=True)),
                'options': launch.validated(options),
            },
            mpi=1,
            has_ranks=False,
        )

    return Command(
        name,
        start,
        {**fields, **LABEL_FIELDS},
        [click.Argument(['exp'], metavar='EXPERIMENT'), *arguments],
        **HELP[name],
    )
