"""Code that comes with a run: it is run only if this user has named it on this machine."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import invoke
from label_folders import make_folder

import sample
from lm_human_preferences.errors import UserError
from lm_human_preferences.language import encodings
from lm_human_preferences.reward_sources import loading
from lm_human_preferences.runs import reward_function

SCORE = '\ndef score(queries, responses):\n return [float(len(r)) for r in responses]\n'
QUICK = ['--mpi=1', '--run.console=original', '--run.evaluate=off', '--ppo.total_episodes=64']


@pytest.fixture(autouse=True)
def nothing_is_named_here(tmp_path, monkeypatch):
    monkeypatch.setenv('LMHP_CACHE', f'{tmp_path}/cache')


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
        source = reward_function.Source(function, code or self.code)
        for name, record in reward_function.records(source).items():
            text = record if isinstance(record, str) else json.dumps(record)
            (self.run / name).write_text(text)
        self.sets(**{'rewards.function': function, **settings})

    def sets(self, **options):
        """Record the options, of the port or of the original."""
        for name in ('train_policy_hparams.json', 'train_policy_more_hparams.json'):
            record = json.loads((self.run / name).read_text())
            for option, value in options.items():
                group, _, key = option.partition('.')
                if name == 'train_policy_hparams.json' and key in record[group]:
                    record[group][key] = value
                elif name != 'train_policy_hparams.json' and option in record['options']:
                    record['options'][option] = value
            (self.run / name).write_text(json.dumps(record))

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
    'a file in the cache': '{folder}/cache/any.py',
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
    assert sum('code that comes with a run is not run: read' in each.output for each in results) > 6
    # ... until the user, who has read the file, names it.
    named = f'{given.run}/reward_function.py:score'
    few = ['--queries=2', '--samples=64']
    assert invoke(['evaluate', str(given.run), *few, f'--judge={named}']).exit_code == 0
    assert given.mark.exists()
    assert invoke(['evaluate', str(given.run), *few]).exit_code == 0


SETTINGS = {
    'a reward model': {'rewards.trained_model': '{0}/evil.py:score'},
    'a class': {'rewards.trained_model': '{0}/x', 'rewards.class_name': 'evil.py:score'},
    'a reward model of a function': {'rewards.trained_model': '{0}/evil.py:score/'},
}


@pytest.mark.parametrize('settings', SETTINGS.values(), ids=SETTINGS)
def test_recorded_settings_name_no_code(given, settings):
    for name in ('evil.py', 'x#evil.py'):
        (given.folder / name).write_text(given.code)
    for name in ('reward_function.py', 'reward_function.json'):
        (given.run / name).unlink()
    named = {key: value.format(given.folder) for key, value in settings.items()}
    given.sets(**{'rewards.function': None, **named})
    more = json.loads((given.run / 'train_policy_more_hparams.json').read_text())
    more['options'] = {**more['options'], 'rewards.function': None}
    more['options'].update({key: named[key] for key in named if key.endswith('class_name')})
    (given.run / 'train_policy_more_hparams.json').write_text(json.dumps(more))
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


def test_the_mark_is_of_what_is_run(tmp_path):
    """Not of another function of the same file, and not of what others put into the cache."""
    path = tmp_path / 'own.py'
    path.write_text(f'from os import system\n{SCORE}')
    own = reward_function.read(f'{path}:score')
    (mark,) = (tmp_path / 'cache').glob('reward_functions*/*')
    assert mark.stat().st_mode & 0o777 == 0o600
    (tmp_path / 'run').mkdir()

    def learned_from(source):
        for name, record in reward_function.records(source).items():
            text = record if isinstance(record, str) else json.dumps(record)
            (tmp_path / 'run' / name).write_text(text)

    moved = reward_function.Source('/elsewhere/x.py:score', own.text)
    learned_from(moved)
    found = reward_function.function_of_run(f'{tmp_path}/run')
    assert found.text == own.text and found.path == str(path)  # beside which it may read files
    other = reward_function.Source('/elsewhere/x.py:system', own.text)
    learned_from(other)
    with pytest.raises(UserError, match='you have not named on this machine'):
        reward_function.function_of_run(f'{tmp_path}/run')
    forged = mark.with_name(other.key)
    for content, mode in ((mark.read_text(), 0o600), (f'{other.key} /x.py', 0o666)):
        forged.write_text(content)
        forged.chmod(mode)
        with pytest.raises(UserError, match='you have not named on this machine'):
            reward_function.function_of_run(f'{tmp_path}/run')
    forged.chmod(0o600)
    # As its owner could write it
    assert reward_function.function_of_run(f'{tmp_path}/run').path == '/x.py'
    if os.geteuid() == 0:
        os.chown(forged, 12345, 12345)
        with pytest.raises(UserError, match='you have not named on this machine'):
            reward_function.function_of_run(f'{tmp_path}/run')


def test_modules_beside_a_function_are_not_imported(tmp_path):
    """Neither those that it needs, of which a line tells, nor any that is imported later."""
    (tmp_path / 'beside').mkdir()
    for name in ('botocore.py', 'needed.py', 'package/__init__.py'):
        (tmp_path / 'beside' / name).parent.mkdir(exist_ok=True)
        (tmp_path / 'beside' / name).write_text('raise SystemError("it was run")')
    before = list(sys.path)
    for text in ('', 'import needed\n', 'import package.part\n'):
        path = tmp_path / 'beside/own.py'
        path.write_text(text + SCORE)
        try:
            loading.load_reward_model(f'{path}:score', encodings.Reviews)
        except UserError as error:
            name = 'package' if 'package' in text else 'needed'
            assert f"ModuleNotFoundError: No module named '{name}'" in str(error)
            assert f'or install {name}' in str(error) and '\n' not in str(error)
        else:
            assert not text
        assert sys.path == before
    assert importlib.util.find_spec('botocore') is None


def test_the_folder_one_is_in_is_not_imported_from(given):
    """Neither by the command, nor by ranks that it starts."""
    for name in ('torch.py', 'click.py', 'botocore.py', 'mpi4py.py', 'sitecustomize.py'):
        (given.run / name).write_text(given.code)
    given.sets(**{'rewards.function': None, 'rewards.trained_model': 'test'})
    launch = Path(__file__).parents[2] / 'launch.py'
    command = [sys.executable, str(launch), 'resume', '.', '--mpi=2', '--ppo.total_episodes=128']
    done = subprocess.run(command, cwd=given.run, capture_output=True, text=True, timeout=300)
    assert '2 ranks' in done.stdout, done.stdout + done.stderr
    assert not given.mark.exists()
