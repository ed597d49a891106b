"""Runs on a disk of a few MiB: a file system in memory, in a mount namespace of the test's own."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
ISOLATED = ['unshare', '--user', '--map-root-user', '--mount', 'sh', '-c']
TRAIN = (
    'train_policy test run --mpi 1 --run.log_interval 1 --run.save_interval 1 --ppo.total_episodes'
    ' 640 --run.console original'
)


def on_disk(directory, mib, script):
    """The result of a shell script whose DISK has `mib` MiB and whose LAUNCH is launch.py; skips
    where none can be."""
    mount = f'mount -t tmpfs none {shlex.quote(str(directory))}'
    if subprocess.run([*ISOLATED, mount], capture_output=True, check=False).returncode:
        pytest.skip('no file system can be mounted here')
    setup = (
        f'DISK={shlex.quote(str(directory))}; LAUNCH="{sys.executable} {ROOT}/launch.py"; '
        f'mount -t tmpfs -o size={mib}m none $DISK; '
    )
    return subprocess.run([*ISOLATED, setup + script], capture_output=True, text=True, timeout=300)


def test_full_in_training_and_emptied_again(tmp_path):
    """The run ends with one line; what was saved is whole, and the run goes on from there when
    there is room."""
    script = f"""
(until [ -e $DISK/run/policy/checkpoints/model.ckpt-2.index ]; do sleep 0.01; done
 head -c 40000000 /dev/zero > $DISK/ballast) 2> /dev/null &
$LAUNCH {TRAIN} --save_dir $DISK --ppo.noptepochs 60
echo STATUS $?
wait
rm $DISK/ballast
$LAUNCH resume $DISK/run --ppo.noptepochs 1 --run.console original"""
    result = on_disk(tmp_path, 16, script)
    assert result.returncode == 0, result.stderr
    assert 'STATUS 2\n' in result.stdout
    (error,) = (line for line in result.stderr.splitlines() if line.startswith('error: '))
    assert error.startswith('error: cannot save model.ckpt-') and 'No space left on device' in error
    first, second = result.stdout.split('STATUS 2\n')
    assert 'Going on from ' in second and '[ppo_step 9]' in second and '[ppo_step 9]' not in first
    assert 'Traceback' not in result.stderr


def test_read_only(tmp_path):
    result = on_disk(tmp_path, 16, f'mount -o remount,ro $DISK; $LAUNCH {TRAIN} --save_dir $DISK')
    assert result.returncode == 2
    assert (
        result.stderr
        == f'error: --save_dir: {tmp_path}/run cannot be made: {tmp_path} is no directory that you'
        ' may write to\n'
    )
