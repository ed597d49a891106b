"""Words of a command line; values are tested in test_cli."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import launch
from lm_human_preferences.cli import arguments
from lm_human_preferences.errors import UserError
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import option


@dataclass
class Options(hyperparams.HParams):
    flag: bool = option(False, 'a flag')
    n: int = option(0, 'a number')
    text: str = option('', 'a text')
    current: bool = option(False, 'a flag with another name than before', formerly='old_name')


@pytest.mark.parametrize(
    'words, given',
    [
        ('a', {}),
        ('--n 3 a', {'n': '3'}),
        ('a --flag', {'flag': 'True'}),
        ('--flag a', {'flag': 'True'}),
        ('--flag f a', {'flag': 'f'}),
        ('a f', {'flag': 'f'}),
        ('a f 3', {'flag': 'f', 'n': '3'}),
        ('a 3 --flag', {'flag': 'True', 'n': '3'}),
        ('--arg=a --n=3', {'n': '3'}),
        ('-- a', {}),
        ('--noflag a', {'flag': 'False'}),
        ('--text -x a', {'text': '-x'}),
        ('--text=--n a', {'text': '--n'}),
        ('--n=1 --n=2 a', {'n': '2'}),
        ('--old_name a', {'current': 'True'}),
        ('--old-name=f a', {'current': 'f'}),
        ('--noold_name a', {'current': 'False'}),
        ('--old_name t --current f a', {'current': 'f'}),
        ('-5', {'arg': '-5'}),
    ],
)
def test_words(words, given):
    read = arguments.read_words(
        words.split(), hyperparams.fields(Options), {'arg': 'ARG'}, ('flag', 'n')
    )
    assert read == {'arg': 'a', **given}


NAMES = (
    'ppo.batch_size',
    'ppo.lr',
    'ppo.lam',
    'run.log_interval',
    'task.log_internals',
    'rewards.train_new_model.rollout_batch_size',
    'seed',
)


@pytest.mark.parametrize(
    'name, meant',
    [
        ('batchsize', 'ppo.batch_size'),  # the group is left out
        ('pop.batchsize', 'ppo.batch_size'),
        ('log_intervals', 'run.log_interval'),  # the likest of two
        ('tsk.log_intervals', 'task.log_internals'),
        ('qqq.log_intervals', None),  # another group
        ('qqq.batch_size', 'ppo.batch_size'),  # but the very name
        ('run_log_intervall', 'run.log_interval'),  # nearly the same as a whole
        ('ppo.lerning_rate', 'ppo.lr'),
        ('ppo.lambda', 'ppo.lam'),
        ('rollout_batch_sizes', 'rewards.train_new_model.rollout_batch_size'),  # and no shorter one
        ('ppo.batch', 'ppo.batch_size'),  # the beginning of a name
        ('batch', 'ppo.batch_size'),
        ('ppo.b', None),
        ('sede', 'seed'),
        ('ppo.zzz', None),
        ('seeds', 'seed'),
    ],
)
def test_what_an_unknown_option_may_have_meant(name, meant):
    fields = dict.fromkeys(NAMES, hyperparams.fields(Options)['n'])
    with pytest.raises(UserError) as caught:
        arguments.read_words([f'--{name}', '1'], fields, {}, ())
    hint = f' (did you mean --{meant}?)' if meant else ''
    assert str(caught.value) == f'no such option: --{name}{hint}'


def test_what_is_less_alike_was_not_meant():
    """Four letters of six and of five; of six and of seven."""
    assert arguments.did_you_mean('policy', ['polis', 'polite']) == ' (did you mean polis?)'
    assert arguments.did_you_mean('policy', ['polizei']) == ''


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.text(max_size=8),
            st.sampled_from(
                [
                    'a',
                    '--ppo.lr',
                    '--ppo.lr=',
                    '--run.seed',
                    '--dry_run',
                    '--noppo.whiten_rewards',
                    '--rewards.adaptive_kl',
                    '--exp',
                    '--task.start_text',
                    "'",
                    '"off"',
                    '1e999',
                    '0x',
                    '-1',
                    '--',
                    '(' * 9,
                    'None',
                ]
            ),
        ),
        max_size=6,
    )
)
def test_any_words_are_read_or_refused(words):
    fields = launch.cli.commands['train_policy'].fields
    try:
        given = arguments.read_words(
            words, fields, {'exp': 'EXPERIMENT', 'name': 'NAME'}, ('dry_run', 'mpi')
        )
        for key in given.keys() & fields.keys():
            arguments.convert(key, fields[key], given[key])
    except UserError:
        pass  # anything else would reach the user as a traceback


def test_after_a_bare_double_dash_there_are_no_options():
    names = {'a': 'A', 'b': 'B', 'c': 'C'}
    given = arguments.read_words(['--', '--name', '-x', '--'], {}, names)
    assert given == {'a': '--name', 'b': '-x', 'c': '--'}


def test_a_file_whose_name_begins_with_a_dash_is_not_taken_for_an_option(tmp_path, monkeypatch):
    (tmp_path / '-texts').touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r'begins with a dash as \./-texts$'):
        arguments.read_words(['-texts'], {}, {'file': 'FILE'})
