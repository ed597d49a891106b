"""README and docs/: commands are understood, options and links exist, options.md is current."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import caught_jobs, succeed
from documentation import tool
from experiments import resolved
from surroundings import SAVES

import launch
import sample
from lm_human_preferences.cli import program
from lm_human_preferences.cli.arguments import convert
from lm_human_preferences.language.networks.gpt2_files import HParams
from lm_human_preferences.plan.phases import policy_phase
from lm_human_preferences.runs import run_dir, run_settings

ROOT = Path(__file__).parents[2]
README = (ROOT / 'README.md').read_text(encoding='utf-8')
# What was measured; guides link to it.
RESULTS = ('benchmarks/labels.md', 'benchmarks/quality.md', 'benchmarks/real/README.md')
OTHERS = ('CHANGELOG.md', 'CONTRIBUTING.md', 'benchmarks/README.md')
GUIDES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob('docs/*.md'))


def read(*names):
    return {name: (ROOT / name).read_text(encoding='utf-8') for name in names}


PAGES = read('README.md', *GUIDES, *RESULTS)
LINKING = PAGES | read(*OTHERS)
SETUP, RUN = 'sh tools/setup.sh', '&& .venv/bin/pipenv run'
FIRST = f'{SETUP} {RUN} ./launch.py train_policy mock_sentiment first --mpi 1'
TESTS = f'{SETUP} --dev {RUN} pytest'
SIZES = {  # width, heads and blocks
    '124M': (768, 12, 12),
    '355M': (1024, 16, 24),
    '774M': (1280, 20, 36),
    '1558M': (1600, 25, 48),
}
TRAININGS = ('train_reward', 'train_policy')
OTHER_TOOLS = set(
    '--dev --hostfile --logdir --kill-on-bad-exit --ntasks'
    ' --gpus-per-task --nproc-per-node --nnodes --node-rank --master-addr'
    ' --master-port --rdzv-backend --rdzv-id --rdzv-endpoint --max-restarts --mca'
    ' --shutdown-timeout --standalone --signal --initial'
    ' --seeds --trials --picture'.split()
)
SPELLINGS = {'--noppo.whiten_rewards', '--flag', '--noflag'}  # other ways to set a switch


def test_options_page_is_up_to_date():
    page = tool('options').page().replace(SAVES, '/tmp/save')
    assert PAGES['docs/options.md'] == page, 'write it anew: pipenv run python tools/options.py'


def test_readme_is_short_and_its_first_command_installs():
    assert len(README.splitlines()) <= 220
    blocks = code_blocks(README)
    assert blocks[0] == f'    {FIRST}\n' and blocks[1] == f'    {TESTS}\n'


@pytest.mark.parametrize('path', ['.ci/run', '.github/workflows/tests.yml'])
def test_both_commands_of_readme_run_in_ci_in_their_order(path):
    script = (ROOT / path).read_text(encoding='utf-8')
    assert script.count(FIRST) == script.count(TESTS) == 1
    assert script.index(FIRST) < script.index(TESTS)


def test_memory_in_benchmarks_is_what_the_program_estimates():
    hparams = resolved('train_policy', 'sentiment')
    hparams.ppo.micro_batch_size = 8
    page = LINKING['benchmarks/README.md']
    rows = re.findall(r'^\| `(\w+)` \| ([\d.]+) GB \| ([\d.]+) GB \|', page, re.MULTILINE)
    assert [name for name, *_ in rows] == list(SIZES)
    for name, *shown in rows:
        n_embd, n_head, n_layer = SIZES[name]
        sizes = HParams(n_vocab=50257, n_ctx=1024, n_embd=n_embd, n_head=n_head, n_layer=n_layer)
        training = policy_phase(hparams)
        estimates = [training.memory(sizes, 1, torch.device(kind)) for kind in ('cpu', 'cuda')]
        assert shown == [f'{each / 1e9:.1f}' for each in estimates], name


def code_blocks(text):
    return re.findall(r'(?:^    .*\n)+', text, re.MULTILINE)


@pytest.fixture(scope='module')
def commands(tmp_path_factory):
    """{page: what its code blocks, run one after the other by one shell, ask pipenv to run}."""
    return {
        name: _commands_of(text, tmp_path_factory.mktemp('page')) for name, text in PAGES.items()
    }


def _commands_of(text, folder):
    record = folder / 'commands'
    stub = (
        f'#!{sys.executable}\nimport json, sys\nopen({str(record)!r},'
        ' "a").write(json.dumps(sys.argv[1:]) + "\\n")\n'
    )
    for name in ('bin/pipenv', '.venv/bin/pipenv', 'tools/setup.sh'):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('exit 0\n' if name == 'tools/setup.sh' else stub)
        path.chmod(0o755)
    script = '\n'.join(block for block in code_blocks(text) if 'pipenv' in block)
    environment = {'PATH': f'{folder}/bin:/usr/bin:/bin'}
    subprocess.run(['sh', '-eu', '-c', script], cwd=folder, check=True, env=environment)
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def of_program(commands, name):
    return [args for page in commands.values() for _, program, *args in page if program == name]


def test_commands_name_what_is_there(commands):
    found = [command for page in commands.values() for command in page]
    assert all(run == 'run' for run, *_ in found)
    programs = './launch.py ./sample.py mpiexec pip pytest python tensorboard'
    assert {program for _, program, *_ in found} == set(programs.split())
    scripts = re.findall(
        r'\b(?:python|sh) ((?:tools|benchmarks|tests/helpers)/\S+?)[`\s]',
        '\n'.join(LINKING.values()),
    )
    tools = {'tools/lock.py', 'tools/options.py', 'tools/setup.sh', 'tools/horovod.sh'}
    assert tools <= set(scripts)
    assert [script for script in scripts if not (ROOT / script).exists()] == []


def test_trainings_are_understood(commands, started, monkeypatch):
    lines, ranks = of_program(commands, './launch.py'), r'\b(?:mpiexec|mpirun|srun|torchrun)'
    for line in re.findall(rf'^    .*{ranks} .*\./launch\.py .*$', '\n'.join(PAGES.values()), re.M):
        lines.append(shlex.split(line.partition('./launch.py ')[2]))
    # A dry run reads its model: test_guides.py.
    trainings = [args for args in lines if args[0] in TRAININGS and '--dry_run' not in args]
    assert {tuple(args[:2]) for args in trainings} >= {
        ('train_policy', 'mock_sentiment'),
        ('train_policy', 'test'),
        ('train_policy', 'descriptiveness'),
        ('train_reward', 'descriptiveness'),
        ('train_reward', 'sentiment'),
    }
    # It asks stores and disks.
    monkeypatch.setattr(run_dir, 'prepare_run_dir', lambda *args, **settings: None)
    for number, args in enumerate(trainings, start=1):
        succeed(args)
        assert len(started) == number, args


@pytest.mark.parametrize('program, cli', [('./launch.py', launch.cli), ('./sample.py', sample.cli)])
def test_other_commands_are_understood(commands, program, cli, monkeypatch):
    """Their words are known and their values of the right type; their runs are not there."""
    monkeypatch.setattr(run_settings, 'load_run_hparams', lambda save_dir: None)
    others = [args for args in of_program(commands, program) if args[0] not in TRAININGS]
    assert {args[0] for args in others} == cli.commands.keys() - {*TRAININGS}
    for name, *args in others:
        command = cli.commands[name]
        given = command.make_context(name, args).params
        settings = {
            key: convert(key, field, given[key])
            for key, field in command.fields.items()
            if key in given
        }
        if name == 'sample':
            started = caught_jobs(monkeypatch)
            sample.sample(settings)
            assert len(started) == 1


def code(text):
    prose = re.sub(r'(?:^    .*\n)+', '\n', text, flags=re.MULTILINE)
    return code_blocks(text) + re.findall(r'`([^`\n]+)`', prose)


@pytest.mark.parametrize('page', PAGES)
def test_every_option_that_is_named_exists(page):
    known = {*program.HELP, '--version', *OTHER_TOOLS}
    for command in [*launch.cli.commands.values(), *sample.cli.commands.values()]:
        known.update(f'--{key}' for key in command.fields)
    groups = {name.rpartition('.')[0] for name in known}
    words = re.findall(r'(?<![\w-])--[a-z][\w.=-]*', '\n'.join(code(PAGES[page])))
    named = {word.partition('=')[0].removesuffix('.NAME').removesuffix('.') for word in words}
    assert named - known - groups - SPELLINGS == set()


@pytest.mark.parametrize('page', LINKING)
def test_links_lead_somewhere(page):
    links = re.findall(r'\]\((?!https?:)([^)#]*)#?([^)]*)\)', LINKING[page])
    for path, heading in links:
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), path
        if heading:
            headings = re.findall(r'^#+ (.*)$', target.read_text(encoding='utf-8'), re.MULTILINE)
            plain = [re.sub(r'[^\w -]', '', each).lower().replace(' ', '-') for each in headings]
            assert heading in plain, (path, heading)
