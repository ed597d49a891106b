"""`./launch.py report`: of several runs, of a remote one, and what it says where it cannot."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from blobserver.fixtures import KEY
from command_line import error_of, invoke, succeed
from page_rules import words_of
from run_folders import write_settings
from two_runs import LABELLERS, amber, birch, make_two_runs

ROOT = Path(__file__).parents[2]
ALONE = """
import sys, launch
try:
    launch.cli(sys.argv[1:])
finally:
    print([name for name in ('torch', 'transformers') if name in sys.modules])
"""


def test_several_runs_are_on_one_page_without_torch(tmp_path):
    runs = make_two_runs(tmp_path)
    output = tmp_path / 'page.html'
    words = ['report', *map(str, runs.values()), '--output', str(output)]
    done = subprocess.run(
        [sys.executable, '-c', ALONE, *words], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    told, loaded = done.stdout.splitlines()
    assert told == f'The report is in {output}' and loaded == '[]'
    assert '<title>2 runs: report</title>' in output.read_text()


def test_the_page_is_in_the_folder_of_the_run_and_need_not_name_labellers(tmp_path):
    run = birch(tmp_path / 'run')
    succeed(f'report {run} --names off')
    assert not any(name in (run / 'report.html').read_text() for name in LABELLERS)


def test_a_remote_run(server, blobs, monkeypatch, tmp_path):
    monkeypatch.setenv('AZURE_STORAGE_KEY', KEY)
    run = amber(tmp_path / 'run')
    for path in run.rglob('*'):
        if path.is_file():
            blobs['private/runs'][f'amber/{path.relative_to(run)}'] = path.read_bytes()
    succeed(f'report az://private/runs/amber --output {tmp_path}/page.html')
    said = words_of((tmp_path / 'page.html').read_text())
    for fact in ('91 % ± 2 % of the possible gain', 'moving and superb', 'was resumed'):
        assert fact in said, fact


@pytest.mark.parametrize(
    'words, expected',
    [
        ('{0}', '{0} is not a run of this program: it has no settings file'),
        ('{0}/run --output {0}', '--output {0} cannot be written: Is a directory'),
        ('{0}/run --output /dev/null/x', '--output /dev/null/x cannot be written: File exists'),
        ('{0}/run --output az://a/b/x', '--output az://a/b/x: give a file on this machine'),
    ],
)
def test_what_cannot_be_done_is_told_in_one_line(tmp_path, words, expected):
    write_settings(tmp_path / 'run', 'train_reward', 'test', ranks=1)
    assert error_of(invoke(f'report {words.format(tmp_path)}')) == expected.format(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ['run']
