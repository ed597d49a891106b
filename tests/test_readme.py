"""README stays true: its tables are the code's, and its commands are understood."""
import dataclasses
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import launch
import sample
from lm_human_preferences.hparams import task, train_policy, train_reward
from lm_human_preferences.utils import hyperparams

ROOT = Path(__file__).parents[1]
README = (ROOT / 'README.md').read_text(encoding='utf-8')
GROUPS = {'Run: `--run.`': train_reward.RunHParams,
          'Task: `--task.`': task.TaskHParams,
          'Policy: `--task.policy.`': task.PolicyHParams,
          'Labels: `--labels.`': train_reward.LabelHParams,
          'Reward training': train_reward.HParams,
          'Rewards: `--rewards.`': train_policy.RewardHParams,
          'Adaptive KL: `--rewards.adaptive_kl.`': train_policy.AdaptiveKLParams,
          'PPO: `--ppo.`': train_policy.PpoHParams}
HPARAMS = hyperparams.fields(train_policy.HParams)


def tables():
    """{heading: {option: Field}}. Groups that are always on have tables of their own."""
    commands = launch.cli.commands['train_policy'], sample.cli.commands['sample']
    return {'Launching': {key: field for key, field in commands[0].fields.items() if key not in HPARAMS},
            'Sampling': commands[1].fields,
            'Evaluation': launch.cli.commands['evaluate'].fields,
            'Figures': launch.cli.commands['figures'].fields,
            **{heading: {f.name: f for f in dataclasses.fields(cls) if f.metadata} for heading, cls in GROUPS.items()}}


def default_text(field):
    if hyperparams.group_class(field.type):
        return 'off'
    if field.default is None and type(None) not in hyperparams.members(field.type):
        return 'required'
    return f'`{field.default!r}`'


def rows(fields):
    return [f'| `{name}` | {default_text(f)} | {f.metadata["help"]} |' for name, f in fields.items()]


@pytest.mark.parametrize('heading', tables())
def test_option_table(heading):
    section = README.partition(f'\n### {heading}\n')[2].partition('\n#')[0]
    found = re.findall(r'^\| `.*\|$', section, re.MULTILINE)
    assert found == rows(tables()[heading]) and found


def test_every_option_group_has_a_table():
    groups = {hyperparams.group_class(field.type) for field in HPARAMS.values()}
    assert groups - {None} == set(GROUPS.values())


def code_blocks():
    """The indented code blocks."""
    return re.findall(r'(?:^    .*\n)+', README, re.MULTILINE)


@pytest.fixture(scope='module')
def commands(tmp_path_factory):
    """What README's code blocks, run one after the other by one shell, ask pipenv to run."""
    folder, record = tmp_path_factory.mktemp('readme'), tmp_path_factory.mktemp('record') / 'commands'
    stub = f'#!{sys.executable}\nimport json, sys\nopen({str(record)!r}, "a").write(json.dumps(sys.argv[1:]) + "\\n")\n'
    for name in ('bin/pipenv', '.venv/bin/pipenv', 'tools/setup.sh'):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('exit 0\n' if name == 'tools/setup.sh' else stub)
        path.chmod(0o755)
    script = '\n'.join(block for block in code_blocks() if 'pipenv' in block)
    subprocess.run(['sh', '-eu', '-c', script], cwd=folder, check=True, env={'PATH': f'{folder}/bin:/usr/bin:/bin'})
    return [json.loads(line) for line in record.read_text().splitlines()]


def test_commands_name_what_is_there(commands):
    assert {program for run, program, *_ in commands} == {
        './launch.py', './sample.py', 'mpiexec', 'pytest', 'tensorboard', 'ruff', 'python'}
    assert all(run == 'run' for run, *_ in commands)
    assert [args for _, program, *args in commands if program == 'python'] == [['tools/lock.py']]
    assert (ROOT / 'tools/lock.py').exists() and (ROOT / 'tools/setup.sh').exists()


def test_launch_commands_are_understood(commands):
    launches = [args for _, program, *args in commands if program == './launch.py']
    for line in re.findall(r'^    .*\b(?:mpiexec|srun) .*$', README, re.MULTILINE):
        launches.append(shlex.split(line.partition('./launch.py ')[2]))
    assert {tuple(args[:2]) for args in launches} >= {
        ('train_policy', 'mock_sentiment'), ('train_policy', 'test'), ('train_policy', 'descriptiveness'),
        ('train_reward', 'descriptiveness'), ('figures', './figures')}
    for args in launches:
        if args[0] in ('export', 'evaluate', 'figures', 'resume'):  # have no dry run
            launch.cli.commands[args[0]].make_context(args[0], args[1:])
            continue
        command = [sys.executable, ROOT / 'launch.py', *args, '--dry_run']
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, (args, result.stderr)
        assert 'hparams:' in result.stdout, args


def test_sample_commands_are_understood(commands):
    samplings = [args for _, program, *args in commands if program == './sample.py']
    assert len(samplings) >= 2
    for command, *args in samplings:
        sample.cli.commands[command].make_context(command, args)


def test_links_lead_somewhere():
    links = re.findall(r'\]\((?!https?:)([^)#]*)#?([^)]*)\)', README)
    headings = {re.sub(r'[^\w -]', '', heading).lower().replace(' ', '-')
                for heading in re.findall(r'^#+ (.*)$', README, re.MULTILINE)}
    assert {path for path, _ in links if path} >= {'docs/evaluation.png', 'launch.py'}
    for path, heading in links:
        assert (ROOT / path).exists() and (not heading or heading in headings), (path, heading)
    assert all(picture.stat().st_size < 150_000 for picture in (ROOT / 'docs').iterdir())


def test_variables_are_documented():
    source = '\n'.join(p.read_text(encoding='utf-8') for p in (ROOT / 'lm_human_preferences').rglob('*.py'))
    used = set(re.findall(r'\benviron\b.*?(LMHP_\w+)', source)) - {'LMHP_RANKS'}  # set by the launcher, not by users
    assert used and used | {'LMHP_GOLDEN'} == set(re.findall(r'LMHP_\w+', README))
