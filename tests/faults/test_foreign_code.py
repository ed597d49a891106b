"""Code that comes with a run: none of it is run that the very command does not name."""

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from command_line import invoke
from label_folders import make_folder
from run_folders import change_settings

import sample
from lm_human_preferences.errors import UserError
from lm_human_preferences.language import encodings
from lm_human_preferences.reward_sources import loading
from lm_human_preferences.runs import reward_function, run_files, run_record

SCORE = '\ndef score(queries, responses):\n return [float(len(r)) for r in responses]\n'
QUICK = ['--mpi=1', '--run.console=original', '--run.evaluate=off', '--ppo.total_episodes=64']


@pytest.fixture(scope='module')
def whole_run(tmp_path_factory):
    """A run that learned from a function of whoever made it."""
    folder = tmp_path_factory.mktemp('made')
    (folder / 'own.py').write_text(SCORE)
    named = f'--rewards.function={folder}/own.py:score'
    new = ['train_policy', 'test', 'run', f'--save_dir={folder}']
    done = invoke([*new, *QUICK, '--rewards.train_new_model=off', named, '--run.seed=1'])
    assert done.exit_code == 0, done.output
    return folder / 'run'


class Given:
    """A copy of that run by an attacker, who writes all of its files, and others beside it."""

    def __init__(self, run, folder):
        self.folder = folder
        self.run = folder / 'given'
        self.mark = folder / 'it was run'
        self.code = f'open({str(self.mark)!r}, "w").close(){SCORE}'
        shutil.copytree(run, self.run)

    def says(self, function, code=None, **settings):
        """Have its files say that it learned from the `function`, whose file holds `code`."""
        path = Path(function.rpartition(':')[0])
        path.parent.mkdir(exist_ok=True)
        path.write_text(code or self.code)
        (self.run / run_files.FUNCTION).write_text(code or self.code)
        self.sets(**{'rewards.function': function, **settings})

    def sets(self, **options):
        """Record the options, of the port or of the original."""
        path = self.run / 'train_policy_hparams.json'
        record = json.loads(path.read_text())
        ours = run_record.training(str(self.run), 'train_policy')['settings']
        for option, value in options.items():
            group, _, key = option.partition('.')
            if key in record[group]:
                record[group][key] = value
            if option in ours:
                change_settings(self.run, **{option: value})
        path.write_text(json.dumps(record))

    def is_used_by_every_command(self):
        run, folder = str(self.run), self.folder
        make_folder(folder / 'labels', 3)
        texts = folder / 'texts.jsonl'
        texts.write_text('{"query": "abc", "sample0": "b", "sample1": "c"}\n')
        few = ['--queries=2', '--samples=64']
        new = ['train_policy', 'test', 'new', f'--save_dir={folder}', *QUICK]
        by_hand = ['--labeller=robot', f'--simulate.reward={run}']
        yield invoke(['resume', run, '--mpi=1', '--ppo.total_episodes=128'])
        yield invoke(['evaluate', run, *few])
        yield invoke(['evaluate', run, *few, f'--judge={run}'])
        yield invoke(['score', run, str(texts)])
        yield invoke(['labels', f'{folder}/labels', f'--reward={run}'])
        yield invoke(['label', f'{folder}/labels', *by_hand])
        yield invoke([*new, '--rewards.train_new_model=off', f'--rewards.trained_model={run}'])
        yield invoke(['report', run, f'--output={folder}/report.html'])
        out = f'{folder}/samples.jsonl'
        words = ['sample', f'--save_dir={run}', '--mpi=1', '--nsamples=1', '--batch_size=1']
        yield invoke([*words, f'--output={out}'], sample.cli)


@pytest.fixture
def given(whole_run, tmp_path):
    return Given(whole_run, tmp_path)


PLACES = {
    "the run's copy": '{run}/reward_function.py',
    'a file that is there': '{folder}/elsewhere/any.py',
}


@pytest.mark.parametrize('place', PLACES.values(), ids=PLACES)
def test_no_command_runs_code_that_a_run_names(given, place):
    """Though the file is there, and its digest is the one that the run records."""
    given.says(f'{place}:score'.format(run=given.run, folder=given.folder))
    results = [*given.is_used_by_every_command()]
    assert not given.mark.exists()
    refused = [result for result in results if result.exit_code]
    assert len(refused) == len(results) - 2  # report tells of it, sample says that score is null
    for result in refused:
        assert result.exit_code == 2, result.output
    told = 'runs only if (you name the function|the command names the function)'
    assert sum(bool(re.search(told, each.output)) for each in results) == len(results) - 1
    # The user, who has read the file, names it, which holds for that command alone.
    named = f'--rewards.function={given.run}/reward_function.py:score'
    evaluate = ['evaluate', str(given.run), '--queries=2', '--samples=64']
    assert invoke([*evaluate, named]).exit_code == 0
    assert given.mark.exists()
    assert invoke(evaluate).exit_code == 2


def test_a_directory_that_is_called_like_a_function_is_no_function(given, monkeypatch):
    code = given.folder / 'shared/a.py'
    given.says(f'{code}:score')
    given.run.rename(f'{code}:score')
    monkeypatch.chdir(given.folder)
    texts = given.folder / 'texts.jsonl'
    texts.write_text('{"query": "abc", "sample0": "b", "sample1": "c"}\n')
    for words in (['evaluate'], ['report'], ['evaluate', 'shared/a.py:score', '--judge']):
        invoke([*words, 'shared/a.py:score'])
    invoke(['score', 'shared/a.py:score', str(texts)])
    invoke(['resume', 'shared/a.py:score'])
    assert not given.mark.exists()


SETTINGS = {
    'a reward model': {'rewards.trained_model': '{0}/evil.py:score'},
    'a class': {'rewards.trained_model': '{0}/x', 'rewards.class_name': 'evil.py:score'},
}


@pytest.mark.parametrize('settings', SETTINGS.values(), ids=SETTINGS)
def test_recorded_settings_name_no_code(given, settings):
    for name in ('evil.py', 'x#evil.py'):
        (given.folder / name).write_text(given.code)
    (given.run / run_files.FUNCTION).unlink()
    named = {key: value.format(given.folder) for key, value in settings.items()}
    given.sets(**{'rewards.function': None, **named})
    classes = {key: named[key] for key in named if key.endswith('class_name')}
    change_settings(given.run, **{'rewards.function': None, **classes})
    for result in given.is_used_by_every_command():
        assert result.exit_code in (0, 2), (result.output, result.exception)
    assert not given.mark.exists()


def test_typed_as_a_reward_model_it_is_refused(given):
    path = given.folder / 'own.py'
    path.write_text(given.code)
    new = ['train_policy', 'test', 'new', f'--save_dir={given.folder}', *QUICK]
    model = f'--rewards.trained_model={path}:score'
    result = invoke([*new, '--rewards.train_new_model=off', model])
    assert result.exit_code == 2 and not given.mark.exists()
    assert 'is a function of your own: give it as --rewards.function' in result.stderr


def test_modules_beside_a_function_are_not_imported(tmp_path):
    """Neither those that it needs, of which a line tells, nor any that is imported later."""
    (tmp_path / 'beside').mkdir()
    for name in ('botocore.py', 'needed.py', 'package/__init__.py'):
        (tmp_path / 'beside' / name).parent.mkdir(exist_ok=True)
        (tmp_path / 'beside' / name).write_text('raise SystemError("it was run")')
    before = list(sys.path)
    path = tmp_path / 'beside/own.py'
    for text in ('', 'import needed\n', 'import package.part\n'):
        path.write_text(text + SCORE)
        reward_function.read.cache_clear()
        try:
            loading.load_reward_model(f'{path}:score', encodings.Reviews, may_be_code=True)
        except UserError as error:
            assert 'modules beside the file are not imported' in str(error)
            assert '\n' not in str(error)
        else:
            assert not text
        assert sys.path == before
    assert importlib.util.find_spec('botocore') is None
