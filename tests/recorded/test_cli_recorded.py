"""The command line against the recorded command lines of experiments.json."""

import copy
import os

import pytest
from command_line import (
    NEW,
    PUBLISHED,
    dumped,
    error_of,
    flat,
    hparams_of,
    invoke,
    succeed,
)
from experiments import CLASSES, EXPERIMENTS, RECORDED, recorded_hparams, resolved

from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import group_class, members


class Refused(Exception):
    """A command line that is to end with a line that names this."""


def meaning(ty, value, words):
    """Return what a value that fire had read means for a field of type `ty`."""
    if group_class(ty):
        return {True: 'on', False: 'off', None: 'off'}.get(value, value)
    if value is None and type(None) in members(ty):
        return None
    if str in members(ty) and value is not None:
        return value if isinstance(value, str) else words
    if isinstance(value, bool):
        return next((known(value) for known in (bool, int, float) if known in members(ty)), value)
    if isinstance(value, float) and int in members(ty):
        if value.is_integer():
            return int(value)
        raise ValueError('original-defects 9: it was cut off')
    return hyperparams.parse(ty, str(value))


def settings_of(case, cls):
    """The user's settings in a recorded command line, by dotted name; raises Refused."""
    known, found = hyperparams.fields(cls), {}
    for key, recorded in case['call']['extra_hparams'].items():
        value = recorded['value']
        if key not in known and f'no{key}' in known and value is False:
            # original-defects 8: fire took the flag's name for a negation
            key, value = f'no{key}', True
        if key not in known:
            raise Refused(key.replace('_', '-').split('-')[-1])
        words = next(
            (word.split('=', 1)[1] for word in case['argv'] if word.startswith(f'--{key}=')),
            str(value),
        )
        ty, least = known[key].type, known[key].metadata.get('at_least')
        try:
            found[key] = meaning(ty, value, words)
        except ValueError:
            raise Refused(f'--{key}') from None
        if least is not None and found[key] is not None and found[key] < least:
            raise Refused(f'--{key}')  # it failed later
    return found


def set_leaf(hparams, key, value):
    *path, name = key.split('.')
    for part in path:
        hparams = getattr(hparams, part)
    setattr(hparams, name, copy.deepcopy(value))


def of_other(key):
    """Name of an option of the task for the reward model of a policy, or the other way round."""
    return f'{NEW}.{key}' if key.startswith('task.') else key.removeprefix(f'{NEW}.')


def experiment_of(case):
    names = RECORDED['names'][case['argv'][0].replace('-', '_')]
    words = (word for argument in case['argv'][1:] for word in argument.split('='))
    return next(word for word in words if word in names)


def expected_hparams(case):
    """Return the settings of a recorded command line; raises Refused."""
    command, call, exp = case['argv'][0].replace('-', '_'), case['call'], experiment_of(case)
    for word in case['argv']:
        if word[0] == '-' and word[1:2].isalpha():
            raise Refused(word)  # original-defects 9: it became dry_run
    if not isinstance(call['dry_run'], bool):
        raise Refused(call['dry_run'])  # original-defects 9: so did any word after NAME
    if call['mode'] != 'local':
        raise Refused('--mode')  # it failed later
    if not isinstance(call['mpi'], int) or call['mpi'] < 1:
        raise Refused('--mpi')  # so did this
    if exp not in EXPERIMENTS[command]:
        raise Refused(exp)  # original-defects 7
    hparams, settings = resolved(command, exp), settings_of(case, CLASSES[command])
    for key, value in settings.items():
        if value == 'off':
            set_leaf(hparams, key, None)
            if any(other.startswith(f'{key}.') for other in settings):
                raise Refused(f'--{key}')
        elif value != 'on':  # all groups are on in the recorded experiments that need one
            set_leaf(hparams, key, value)
            if 'task.' in key and command == 'train_policy' and settings.get(NEW) != 'off':
                set_leaf(hparams, of_other(key), value)
    if settings.get(NEW) == 'off' and not hparams.rewards.trained_model:
        hparams.rewards.trained_model = PUBLISHED.format(exp)
    try:
        hparams.validate()
    except (AssertionError, TypeError, ValueError) as e:
        raise Refused(str(e).split()[0]) from None
    if call['save_dir']:
        # Original-defects 7: numbers failed.
        name = call['name'] if isinstance(call['name'], str) else case['argv'][2]
        hparams.run.save_dir = os.path.join(call['save_dir'], name)
    return hparams


@pytest.mark.parametrize(
    'case',
    [case for case in RECORDED['cli'] if case.get('call')],
    ids=lambda case: ' '.join(case['argv']),
)
def test_recorded(case, started):
    result = invoke(case['argv'])
    try:
        expected = expected_hparams(case)
    except Refused as refused:
        assert str(refused) in error_of(result)
        assert not started
        return
    assert result.exit_code == 0, result.output
    if case['call']['dry_run']:
        assert result.stdout.startswith(case['stdout_first_line'][:100])
        assert result.stdout.split('\n', 1)[1] == dumped(expected)
        assert not started
        return
    assert hparams_of(started) == expected
    ((job, _, mpi),) = started
    assert job == case['call']['fn'].replace('.', ':')
    assert mpi == (case['call']['mpi'] if 'mpi' in ' '.join(case['argv']) else None)


@pytest.mark.parametrize(
    'case',
    [case for case in RECORDED['cli'] if 'launched' in case],
    ids=lambda case: ' '.join(case['argv']),
)
def test_recorded_changes(case, started):
    """Command lines that the original accepted, against what it made of them."""
    try:
        expected_hparams(case)
    except Refused as refused:
        pytest.skip(f'refused, which test_recorded checks: {refused}')
    succeed(case['argv'])
    command = case['argv'][0].replace('-', '_')
    expected = flat(recorded_hparams(RECORDED['experiments'][command][experiment_of(case)]))
    for key, value in case['hparams_changed'].items():
        expected[key] = value
        if 'task.' in key and command == 'train_policy' and NEW not in case['hparams_changed']:
            # original-defects 27: it had to be set twice
            expected[of_other(key)] = value
    if case['launched']['run_save_dir'] is not None:
        expected['run.save_dir'] = case['launched']['run_save_dir']
    expected = {key: value for key, value in expected.items() if value != '<absent>'}
    assert flat(hparams_of(started).to_nested_dict()) == expected


@pytest.mark.parametrize(
    'case',
    [case for case in RECORDED['cli'] if not case.get('call')],
    ids=lambda case: ' '.join(case['argv']) or 'nothing',
)
def test_recorded_without_experiment(case, started):
    result = invoke(case['argv'])
    if case['argv'] in ([], ['--help']):
        assert result.exit_code == 0 and result.stdout.startswith('Usage: ')
    else:
        error_of(result)
    assert not started
