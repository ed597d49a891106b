"""Two hosts, each a network namespace with a loopback of its own and addresses instead of names, do
one job together.

Both also have the same address of a bridge that leads nowhere, as hosts with containers do. Needs
root and MPICH.
"""

import os
import shutil
import subprocess
import sys
import uuid

import pytest
from engines import ENGINES, TESTS, WHAT_RANKS_COMPUTE, why_not

from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.distributed import launcher

ADDRESSES = ('10.77.0.1', '10.77.0.2')
BRIDGE = '172.17.0.1'
PATIENCE = 900  # seconds
pytestmark = pytest.mark.slow


def ip(*words):
    subprocess.run(['ip', *words], check=True, capture_output=True, text=True)


def connect(namespaces):
    """A cable between the two, and the bridge in each."""
    ip(
        'link',
        'add',
        'cable',
        'netns',
        namespaces[0],
        'type',
        'veth',
        'peer',
        'name',
        'cable',
        'netns',
        namespaces[1],
    )
    for namespace, address in zip(namespaces, ADDRESSES):
        ip('-n', namespace, 'link', 'add', 'bridge', 'type', 'veth', 'peer', 'name', 'nothing')
        for device, own in (
            ('lo', None),
            ('nothing', None),
            ('bridge', f'{BRIDGE}/16'),
            ('cable', f'{address}/24'),
        ):
            if own:
                ip('-n', namespace, 'addr', 'add', own, 'dev', device)
            ip('-n', namespace, 'link', 'set', device, 'up')


@pytest.fixture(scope='module')
def hosts():
    """Names of the two namespaces."""
    if shutil.which('ip') is None or os.geteuid():
        pytest.skip('network namespaces need root and the command ip')
    if launcher.find_mpiexec()[1]:
        pytest.skip("starts ranks with an option of MPICH's mpiexec")
    namespaces = [f'lmhp-{uuid.uuid4().hex[:8]}' for _ in ADDRESSES]
    try:
        try:
            for namespace in namespaces:
                ip('netns', 'add', namespace)
            connect(namespaces)
        except subprocess.CalledProcessError as e:
            pytest.skip(f'no network namespaces here: {e.stderr.strip()}')
        yield namespaces
    finally:
        for namespace in namespaces:
            subprocess.run(['ip', 'netns', 'del', namespace], capture_output=True)


@pytest.fixture
def run(hosts, tmp_path):
    """Function that runs Python on two ranks of each host, the way that a user's own mpiexec
    --hostfile does."""
    remote = tmp_path / 'remote'
    remote.write_text(
        f'#!/bin/sh\nhost=$1\nshift\ncase $host in {ADDRESSES[0]}) host={hosts[0]};; '
        f'*) host={hosts[1]};; esac\nexec ip netns exec $host sh -c "$*"\n'
    )
    remote.chmod(0o700)

    def run_on_hosts(*command):
        process = subprocess.run(
            [
                'ip',
                'netns',
                'exec',
                hosts[0],
                launcher.find_mpiexec()[0],
                '-launcher',
                'rsh',
                '-launcher-exec',
                remote,
                '-hosts',
                ','.join(f'{address}:2' for address in ADDRESSES),
                '-n',
                '4',
                sys.executable,
                *command,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
            env={**os.environ, 'OMP_NUM_THREADS': '1'},
        )
        assert process.returncode == 0, process.stdout
        return process.stdout

    return run_on_hosts


@pytest.mark.parametrize('engine', ENGINES)
def test_engine(run, engine):
    if why_not(engine):
        pytest.skip(f'{engine}: {why_not(engine)}')
    said = run(TESTS / 'helpers/on_mpi.py', engine, *(TESTS / test for test in WHAT_RANKS_COMPUTE))
    assert f'4 ranks, averaging by {engine}' in said
    assert said.count("'test_comm::test_gradients_are_averaged': 2") == 4


@pytest.mark.parametrize('engine', ENGINES)
def test_training(run, engine, tmp_path):
    if why_not(engine):
        pytest.skip(f'{engine}: {why_not(engine)}')
    run(
        TESTS.parent / 'launch.py',
        'train_policy',
        'test',
        'run',
        f'--save_dir={tmp_path}',
        f'--run.allreduce={engine}',
        '--ppo.total_episodes=128',
    )
    assert checkpoints.latest(str(tmp_path / 'run' / 'policy' / 'checkpoints')).endswith(
        'model.ckpt-2'
    )
