"""Errors under launchers of others, and docs/slurm.sh on a cluster here.

Trainings under each launcher: faults/test_lost_ranks.py.
"""

import re
import sys

import documentation
import pytest
import real_launchers
from launched import REPOSITORY, eventually, start_by_slurm

from lm_human_preferences.checkpointing import checkpoints

pytestmark = pytest.mark.slow
TIMEOUT_SECONDS = 600  # an idle machine needs a tenth of it
SECONDS = 180  # for each part of the batch job, on a machine that has much else to do


def test_a_wrong_option_is_told_once(request, tmp_path):
    """Before the ranks meet."""
    command = [REPOSITORY / 'launch.py', 'train_policy', 'test', 'run', '--ppo.batch=8']
    launcher = real_launchers.find('mpiexec of Open MPI', request)
    run = real_launchers.run(launcher, command, cwd=tmp_path, timeout=TIMEOUT_SECONDS)
    assert run.returncode == 2
    errors = [line for line in run.stderr.splitlines() if line.startswith('error: ')]
    assert len(errors) == 1 and errors[0].startswith("error: No such option '--ppo.batch'. ")


def on_this_machine(script, directory):
    changes = {
        '#SBATCH --ntasks=8\n': '#SBATCH --ntasks=2\n',
        '#SBATCH --gpus-per-task=1\n': '',
        '.venv/bin/python ./launch.py': f'{sys.executable} {REPOSITORY}/launch.py',
        'descriptiveness': 'test',
        '/shared/runs': str(directory),
        '--run.resume on': '--run.resume on --run.console original --ppo.total_episodes 640_000'
        ' --rewards.train_new_model off --rewards.trained_model test',
    }
    return documentation.changed(script, changes)


def test_batch_job_goes_on_after_its_time_limit(slurm, tmp_path):
    """The signal is sent by `scancel --batch`: Slurm itself needs half a minute for it."""
    script = tmp_path / 'job.sh'
    script.write_text(on_this_machine(documentation.page('docs/slurm.sh'), tmp_path))
    output = tmp_path / 'output'
    submitted = slurm.run('sbatch', '--parsable', f'--output={output}', str(script), cwd=REPOSITORY)
    assert submitted.returncode == 0, submitted.stderr
    job = submitted.stdout.strip()

    def said(pattern):
        text = output.read_text() if output.exists() else ''
        return re.search(pattern, text)

    try:
        eventually(lambda: said(r'\[ppo_step 3\]'), SECONDS)
        assert slurm.run('scancel', '--signal=TERM', '--batch', job).returncode == 0
        saved = eventually(lambda: said(r'Step (\d+) of the policy is saved'), SECONDS)
        latest = checkpoints.latest(tmp_path / 'slurm' / 'policy' / 'checkpoints')
        assert latest.endswith(f'model.ckpt-{saved[1]}')
        following = int(saved[1]) + 1
        eventually(lambda: said(rf'{saved[0]}[^~]*\[ppo_step {following}\]'), SECONDS)
    finally:
        # Else the script takes the end for that of its time, and goes back into the queue.
        slurm.run('scontrol', 'update', f'JobId={job}', 'Requeue=0')
        slurm.run('scancel', job)
        eventually(lambda: not slurm.run('squeue', '-h').stdout, SECONDS)
    assert f'[ppo_step {following}]' not in output.read_text().partition(saved[0])[0]


def test_only_one_rank_under_srun_speaks_and_tells_the_error_of_all(tmp_path):
    """The others do not lose the store, which rank 0 keeps, before they know that it is told."""
    first, second = start_by_slurm(tmp_path, 'talk')
    assert (first.wait(), second.wait()) == (2, 2)
    assert first.output().splitlines()[1] == 'rank 0 of [0, 1] speaks'
    told = first.errors() + second.errors()  # the first rank that finds the error reports it
    assert told.count('error: /labels.json is not a label file') == told.count('label file') == 1
    assert second.output() == ''
