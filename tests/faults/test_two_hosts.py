"""Two hosts, imitated by two network namespaces, do one job together.

Each has a loopback of its own, and addresses instead of names. Both also have the same address of a
bridge that leads nowhere, as hosts with containers do. Needs root; the tests of mpiexec need MPICH.
"""

import os
import shutil
import subprocess
import sys
import uuid

import pytest
from engines import TESTS, WHAT_RANKS_COMPUTE, available_engines, on_mpi_command, skip_reason

from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.distributed import launcher

ADDRESSES = ('10.77.0.1', '10.77.0.2')
BRIDGE = '172.17.0.1'
TIMEOUT_SECONDS = 900
pytestmark = pytest.mark.slow


def ip(command):
    subprocess.run(['ip', *command.split()], check=True, capture_output=True, text=True)


def connect(namespaces):
    """A cable between the two hosts, and the bridge on each."""
    first, second = namespaces
    ip(f'link add cable netns {first} type veth peer name cable netns {second}')
    for namespace, address in zip(namespaces, ADDRESSES):
        ip(f'-n {namespace} link add bridge type veth peer name nothing')
        ip(f'-n {namespace} addr add {BRIDGE}/16 dev bridge')
        ip(f'-n {namespace} addr add {address}/24 dev cable')
        for device in ('lo', 'nothing', 'bridge', 'cable'):
            ip(f'-n {namespace} link set {device} up')


@pytest.fixture(scope='module')
def hosts():
    """Names of the two namespaces."""
    if shutil.which('ip') is None or os.geteuid():
        pytest.skip('network namespaces need root and the command ip')
    namespaces = [f'lmhp-{uuid.uuid4().hex[:8]}' for _ in ADDRESSES]
    try:
        try:
            for namespace in namespaces:
                ip(f'netns add {namespace}')
            connect(namespaces)
        except subprocess.CalledProcessError as e:
            pytest.skip(f'no network namespaces here: {e.stderr.strip()}')
        yield namespaces
    finally:
        for namespace in namespaces:
            subprocess.run(['ip', 'netns', 'del', namespace], capture_output=True)


@pytest.fixture
def run_on_hosts(hosts, tmp_path):
    """Function that runs a command on two ranks of each host, by a user's own mpiexec.

    Its remote shell enters the namespace that has the address.
    """
    if launcher.find_mpiexec()[1]:
        pytest.skip("starts ranks with an option of MPICH's mpiexec")
    remote_shell = tmp_path / 'remote_shell'
    remote_shell.write_text(
        '#!/bin/sh\n'
        'host=$1\n'
        'shift\n'
        f'case $host in {ADDRESSES[0]}) host={hosts[0]};; *) host={hosts[1]};; esac\n'
        'exec ip netns exec $host sh -c "$*"\n'
    )
    remote_shell.chmod(0o700)
    mpiexec, _ = launcher.find_mpiexec()
    slots = ','.join(f'{address}:2' for address in ADDRESSES)
    start = ['ip', 'netns', 'exec', hosts[0], mpiexec]
    start += ['-launcher', 'rsh', '-launcher-exec', remote_shell, '-hosts', slots, '-n', '4']

    def run(command):
        process = subprocess.run(
            [*start, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_SECONDS,
            env={**os.environ, 'OMP_NUM_THREADS': '1'},
        )
        assert process.returncode == 0, process.stdout
        return process.stdout

    return run


def test_engines(run_on_hosts):
    """All in one start of the ranks; trainings only by the engine that finds the way by itself."""
    communication, *trainings = WHAT_RANKS_COMPUTE
    by_each = [','.join(available_engines()), str(TESTS / communication)]
    output = run_on_hosts([*on_mpi_command(trainings, 'torch'), '--', *by_each])
    for engine in available_engines():
        assert f'4 ranks, averaging by {engine}' in output
    passed = output.count("'test_comm::test_gradients_are_averaged': 2")
    assert passed == 4 * len(available_engines())
    assert output.count("'test_one_against_many::test_policy_training': 2") == 4
    if skip_reason():
        pytest.skip(skip_reason())


def test_training(run_on_hosts, tmp_path):
    """By the engine that has to find the way between the hosts by itself."""
    run_on_hosts(
        [
            sys.executable,
            TESTS.parent / 'launch.py',
            'train_policy',
            'test',
            'run',
            f'--save_dir={tmp_path}',
            '--run.allreduce=torch',
            '--ppo.total_episodes=128',
        ]
    )
    last = checkpoints.latest(str(tmp_path / 'run' / 'policy' / 'checkpoints'))
    assert last.endswith('model.ckpt-2')


def test_torchrun(hosts, tmp_path):
    """One on each host. As hosts have no names here, they are told their addresses."""
    torchrun = [sys.executable, '-m', 'torch.distributed.run', '--nnodes=2', '--nproc-per-node=1']
    torchrun += ['--rdzv-backend=c10d', f'--rdzv-endpoint={ADDRESSES[0]}:29400', '--rdzv-id=two']
    command = [
        TESTS.parent / 'launch.py',
        *('train_policy', 'test', 'run', f'--save_dir={tmp_path}', '--ppo.total_episodes=128'),
    ]
    options = [
        [f'--local-addr={address}', f'--rdzv-conf=is_host={int(address == ADDRESSES[0])}']
        for address in ADDRESSES
    ]
    processes = [
        subprocess.Popen(
            ['ip', 'netns', 'exec', host, *torchrun, *its_options, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host, its_options in zip(hosts, options, strict=True)
    ]
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], '\n'.join(outputs)
    assert '2 ranks, averaging by torch (gloo)' in ''.join(outputs)
    last = checkpoints.latest(str(tmp_path / 'run' / 'policy' / 'checkpoints'))
    assert last.endswith('model.ckpt-2')
