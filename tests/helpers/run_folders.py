"""Folders of runs, written by hand in milliseconds: all that a run leaves but its networks."""

import json
from unittest import mock

from experiments import binds
from sample_files import write_lines

from lm_human_preferences import storage
from lm_human_preferences.hparams import policy_options, reward_options
from lm_human_preferences.runs import reward_function, run_files, run_record, run_settings
from lm_human_preferences.utils import event_files
from lm_human_preferences.utils.logging import ALARMS

EXPERIMENTS = {
    f'{command}/{name}': binds(command, name)
    for command in ('train_policy', 'train_reward')
    for name in ('sentiment', 'tldr', 'test', 'mock_sentiment', 'chat')
}
HPARAMS = {'train_policy': policy_options.HParams, 'train_reward': reward_options.CommandHParams}
EVALUATION = {
    'exact': True,
    'responses': 9,
    'queries': 4,
    'kl_coef': 1.5,
    'rewards': {
        'reward model': {
            'base': {'kl': 0.0, 'reward': 0.25},
            'policy': {'kl': 2.0, 'reward': 1.5, 'frontier': 2.0, 'share': 0.714},
            'frontier': {},
        }
    },
}
MACHINE = {
    'launcher': 'LaunchMethod',
    'ranks': 1,
    'processor': 'AMD EPYC (avx2 avx512f)',
    'threads': 1,
    'gpu': None,
    'python': '3.11.7',
    'lm-human-preferences': '1.0.0',
    'torch': '2.13.0+cpu',
    'transformers': '5.23.0',
    'numpy': '2.4.6',
}


def write_run(run, command='train_policy', experiment='test', **settings):
    """A whole run of an experiment with two ranks. settings: with __ for dots."""
    write_settings(run, command, experiment, ranks=2, **settings)
    write_learned(run, source='test', found=1024)
    storage.write_json(str(run / 'evaluation.json'), EVALUATION)
    write_events(run / 'tb/ppo', objective__kl=5.5, objective__score=1.25)
    write_events(run / 'tb/reward_model', train_reward__held_out__accuracy=-0.125)
    return run


def write_settings(run, command, experiment, *, ranks, **settings):
    """The settings of a run. settings: that differ from the experiment's, with __ for dots."""
    hparams = HPARAMS[command]()
    hparams.override_from_dict(EXPERIMENTS[f'{command}/{experiment}'])
    hparams.override_from_dict({key.replace('__', '.'): each for key, each in settings.items()})
    hparams.run.save_dir = str(run)
    with mock.patch.object(reward_function, 'read', lambda name: reward_function.Source(name, '')):
        run_settings.write(hparams, str(run), experiment=experiment, ranks=ranks)


def change_settings(run, command='train_policy', **settings):
    """Change recorded options that the original does not have. settings: with __ for dots."""
    record = json.loads((run / run_files.RECORD).read_text())
    record[command]['settings'] |= {key.replace('__', '.'): each for key, each in settings.items()}
    storage.write_json(str(run / run_files.RECORD), record)


def write_learned(run, **labels):
    run_record.write_labels(str(run), 'train_policy', {'digest': '', **labels})


def write_events(directory, **values):
    """Curves of two steps, by 1 apart. values: of the first, {tag with __ for /: value}."""
    curves = {tag.replace('__', '/'): [value, value + 1] for tag, value in values.items()}
    write_curves(directory, curves)


def write_curves(directory, curves, begin=0, *, is_resumed=False):
    """The curves {tag: values of one step after another}, from the step `begin` on."""
    steps = max(map(len, curves.values()))
    with event_files.create(str(directory), begin if is_resumed else None) as file:
        for step in range(steps):
            stats = {tag: values[step] for tag, values in curves.items() if step < len(values)}
            file.write(event_files.record_of(stats, begin + step))


def write_alarm(directory, step, alarm):
    with event_files.create(str(directory), None) as file:
        file.write(event_files.record_of_text(ALARMS, f'    {alarm}', step - 1))


def write_command(run, command, began, ended=None, how='finished', seeds=None, **machine):
    """Write a command's record; ended None: it was killed. machine: differences from MACHINE."""
    record = {'command': command, 'began': began, **MACHINE, **machine, 'seeds': seeds or {}}
    if ended is not None:
        record |= {'ended': ended, 'how': how, 'seconds': 60.5}
    path = run / run_files.RECORD
    found = json.loads(path.read_text()) if path.exists() else {}
    found.setdefault('train_policy', {}).setdefault('commands', []).append(record)
    storage.write_json(str(path), found)


def write_samples(run, steps):
    """Write answers of a policy on the way: {step: [(query, response, score, KL), ...]}."""
    names, rows = ('query', 'response', 'score', 'kl'), []
    for step, answers in steps.items():
        rows += [{'step': step, **dict(zip(names, answer, strict=True))} for answer in answers]
    write_lines(run / run_files.SAMPLES, rows)
