"""Words of a command line; values are tested in test_cli."""

import re
from dataclasses import dataclass

import click
import pytest

import launch
import sample
from lm_human_preferences.cli import arguments, program
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import option


@dataclass
class Options(hyperparams.HParams):
    flag: bool = option(False, 'a flag')
    n: int = option(0, 'a number')
    text: str = option('', 'a text')


@pytest.mark.parametrize(
    'words, given',
    [
        ('a', {}),
        ('--n 3 a', {'n': '3'}),
        ('a --flag', {'flag': 'True'}),
        ('--flag f a', {'flag': 'f'}),
        ('a f 3', {'flag': 'f', 'n': '3'}),
        ('--arg=a --n=3', {'n': '3'}),
        ('-- a', {}),
        ('--text -x a', {'text': '-x'}),
        ('--text=--n a', {'text': '--n'}),
        ('--n=1 --n=2 a', {'n': '2'}),
        ('-5', {'arg': '-5'}),
    ],
)
def test_words(words, given):
    known = hyperparams.fields(Options)
    read = arguments.read_words(words.split(), known, {'arg': 'ARG'}, ('flag', 'n'))
    assert read == {'arg': 'a', **given}


def test_a_text_may_be_on():
    assert arguments.convert('text', hyperparams.fields(Options)['text'], 'on') == 'on'


@dataclass
class Paths(hyperparams.HParams):
    file: str | None = option(None, 'a file', path=True)
    text: str = option('', 'a text')


@pytest.mark.parametrize(
    'words, expected',
    [
        ('--file=~/runs/a x x x', {'file': '/home/anna/runs/a'}),
        ('--file=~/reward.py:score x x x', {'file': '/home/anna/reward.py:score'}),
        ("--file='~/a' x x x", {'file': '/home/anna/a'}),
        ('--file=a/~/b x x x', {'file': 'a/~/b'}),
        ('--text=~/runs x x x', {'text': '~/runs'}),
        ('x --folder=~/a --runs=~', {'folder': '/home/anna/a', 'runs': ('/home/anna',)}),
        ('~/x a ~/b c', {'name': '~/x', 'folder': 'a', 'runs': ('/home/anna/b', 'c')}),
    ],
)
def test_a_tilde_at_the_beginning_of_a_path_is_the_home_directory(words, expected, monkeypatch):
    monkeypatch.setenv('HOME', '/home/anna')
    found = {}

    def job(settings, name, folder, runs):
        found.update(settings, name=name, folder=folder, runs=runs)

    runs = click.Argument(['runs'], type=click.Path(), nargs=-1)
    arguments = [click.Argument(['name']), 'folder', runs]
    command = program.Command('command', job, hyperparams.fields(Paths), arguments)
    command.invoke(command.make_context('command', words.split()))
    assert expected.items() <= found.items()


OF_PATHS = re.compile(r'\b(file|folder|directory|path|FILE)\b')
OTHERS = ('without', 'labeller', 'export_as')  # whose help speaks of a file or folder as well


@pytest.mark.parametrize('cli', [launch.cli, sample.cli])
def test_options_that_are_paths_are_marked(cli):
    for command in cli.commands.values():
        for name, field in command.fields.items():
            is_text = str in hyperparams.members(field.type)
            if is_text and OF_PATHS.search(field.metadata['help'] or ''):
                assert field.metadata.get('path') or field.name in OTHERS, name
