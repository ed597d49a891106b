"""docs/clusters.md: its batch script on a Slurm cluster of this machine, manifest and messages."""

import itertools
import re
import shlex
import sys

import documentation
import pytest
from command_line import caught_jobs, succeed
from launched import REPOSITORY, eventually

from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.runs import run_dir

SECONDS = 180  # for each part of the batch job, on a machine that has much else to do


def test_manifest(monkeypatch):
    yaml = pytest.importorskip('yaml')
    service, job = yaml.safe_load_all(documentation.page('docs/kubernetes.yaml'))
    assert [each['kind'] for each in (service, job)] == ['Service', 'Job']
    spec = job['spec']
    pod = spec['template']['spec']
    name = job['metadata']['name']
    assert service['spec']['selector'] == {'job-name': name}
    assert pod['subdomain'] == service['metadata']['name']
    (container,) = pod['containers']
    shell, option, script = container['command']
    assert (shell, option) == ('sh', '-c')
    words = shlex.split(script)
    settings = dict(itertools.pairwise(words))
    assert int(settings['--nnodes']) == spec['completions'] == spec['parallelism']
    assert settings['--rdzv-endpoint'] == f'{name}-0.{pod["subdomain"]}:29500'
    assert int(settings['--nproc-per-node']) == container['resources']['limits']['nvidia.com/gpu']
    mounted = {each['name']: each['mountPath'] for each in container['volumeMounts']}
    assert mounted.keys() == {each['name'] for each in pod['volumes']}
    assert settings['--save_dir'] == mounted['runs']
    monkeypatch.setattr(run_dir, 'prepare_run_dir', lambda *args, **settings: None)
    started = caught_jobs(monkeypatch)
    succeed(words[words.index('./launch.py') + 1 :])
    assert len(started) == 1


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


@pytest.mark.slow
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
