"""`./launch.py report`: of several runs, of a remote one, and what it says where it cannot."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from blobserver.fixtures import KEY
from command_line import error_of, invoke, succeed
from page_rules import problems, sections_of
from run_folders import write_command, write_settings
from three_runs import LABELLERS, amber, birch, make_three_runs

ROOT = Path(__file__).parents[2]
ALONE = """
import sys, launch
try:
    launch.cli(sys.argv[1:])
finally:
    print([name for name in ('torch', 'transformers', 'matplotlib') if name in sys.modules])
"""


def test_several_runs_are_on_one_page_without_torch(tmp_path):
    runs = make_three_runs(tmp_path)
    output = tmp_path / 'page.html'
    words = ['report', *map(str, runs.values()), '--output', str(output)]
    done = subprocess.run(
        [sys.executable, '-c', ALONE, *words], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    told, _, loaded = done.stdout.splitlines()
    assert told == f'The report is in {output}' and loaded == '[]'
    page = output.read_text()
    assert problems(page) == []
    assert '<title>3 runs – report</title>' in page
    compared = sections_of(page)['Side by side']
    for told in (
        'amber reviews 4096 20 1.42 1.92 90.7 ± 2.2 % 0',
        'birch test 8 12 −0.9 64.5 – 1',
        'cedar reviews 64 200 2.97 5.16 99.0 % 1',
        '--rewards.kl_coef 1.5 0.15 0.05',
    ):
        assert told in compared, told


@pytest.mark.parametrize('names', ['on', 'off'])
def test_the_page_is_in_the_folder_of_the_run_and_need_not_name_labellers(tmp_path, names):
    """Not in its commands and settings either."""
    first, second = birch(tmp_path / 'first'), tmp_path / 'second'
    without = {'labels__source': str(first / 'labels'), 'labels__without': 'ivo'}
    write_settings(second, 'train_reward', 'test', ranks=1, **without)
    line = './launch.py train_reward test x --labels.without ivo --run.serve.labellers=hedda'
    write_command(second, line, '2026-11-08T08:00:00Z', '2026-11-08T09:00:00Z')
    for words, path in (
        (f'{first}', first / 'report.html'),
        (f'{second}', second / 'report.html'),
        (f'{first} {second} --output {tmp_path}/both.html', tmp_path / 'both.html'),
    ):
        succeed(f'report {words} --names {names}')
        page = path.read_text()
        assert [name in page for name in LABELLERS] == [names == 'on'] * 2
    assert ('--run.serve.labellers=NAMES' in page) == ('labeller 1' in page) == (names == 'off')


@pytest.mark.parametrize('command', ['train_policy', 'train_reward'])
def test_a_run_that_has_only_begun(tmp_path, command):
    """A run without a policy has nothing to say of one."""
    write_settings(tmp_path / 'run', command, 'test', ranks=1)
    succeed(f'report {tmp_path}/run')
    page = (tmp_path / 'run/report.html').read_text()
    assert problems(page) == []
    said = sections_of(page)
    assert said['Curves'] == 'Curves This run has no log.'
    assert ('Samples' in said) == ('has not been evaluated' in page) == (command == 'train_policy')


def test_a_remote_run(server, blobs, monkeypatch, tmp_path):
    monkeypatch.setenv('AZURE_STORAGE_KEY', KEY)
    run = amber(tmp_path / 'run')
    for path in run.rglob('*'):
        if path.is_file():
            blobs['private/runs'][f'amber/{path.relative_to(run)}'] = path.read_bytes()
    succeed(f'report az://private/runs/amber --output {tmp_path}/page.html')
    said = sections_of((tmp_path / 'page.html').read_text())
    assert '90.7 ± 2.2 % of' in said['What happened'] and '9, 13' in said['Curves']
    assert 'moving and superb' in said['Samples'] and 'was killed' in said['Where it comes from']


@pytest.mark.parametrize(
    'words, expected',
    [
        ('{0}/none', '{0}/none is not a run of this program: no such directory'),
        ('{0}', '{0} is not a run of this program: it has no settings of a training'),
        ('{0}/run --output {0}', '--output {0} is a directory: give a file in it'),
        ('{0}/run --output /dev/null/x', '--output /dev/null/x cannot be written: File exists'),
        ('{0}/run --output az://a/b/x', '--output az://a/b/x: give a file on this machine'),
    ],
)
def test_what_cannot_be_done_is_told_in_one_line(tmp_path, words, expected):
    write_settings(tmp_path / 'run', 'train_reward', 'test', ranks=1)
    assert error_of(invoke(f'report {words.format(tmp_path)}')) == expected.format(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ['run']
