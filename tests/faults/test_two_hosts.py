"""Two hosts, imitated by two network namespaces, do one job together. Needs root and MPICH."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import uuid

import documentation
import pytest
from launched import (
    CONSOLE,
    FOREVER,
    MPIEXEC,
    REPOSITORY,
    Launch,
    eventually,
    output_of,
    torch_variables,
)
from real_launchers import available_engines

ADDRESSES = ('10.77.0.1', '10.77.0.2')
RANKS = (2, 1)  # an odd number in all
BRIDGE = '172.17.0.1'
QUICK = ('--rewards.train_new_model=off', '--rewards.trained_model=test')
pytestmark = pytest.mark.slow


def ip(command):
    subprocess.run(['ip', *command.split()], check=True, capture_output=True, text=True)


def make(namespaces):
    first, second = namespaces
    for namespace in namespaces:
        ip(f'netns add {namespace}')
    ip(f'link add cable netns {first} type veth peer name cable netns {second}')
    for namespace, address in zip(namespaces, ADDRESSES):
        ip(f'-n {namespace} link add bridge type veth peer name nothing')
        ip(f'-n {namespace} addr add {BRIDGE}/16 dev bridge')
        ip(f'-n {namespace} addr add {address}/24 dev cable')
        for device in ('lo', 'nothing', 'bridge', 'cable'):
            ip(f'-n {namespace} link set {device} up')


@pytest.fixture(scope='module')
def hosts():
    if shutil.which('ip') is None or os.geteuid():
        pytest.skip('network namespaces need root and the command ip')
    namespaces = [f'lmhp-{uuid.uuid4().hex[:8]}' for _ in ADDRESSES]
    try:
        make(namespaces)
        yield namespaces
    except subprocess.CalledProcessError as e:
        pytest.skip(f'no network namespaces here: {e}')
    finally:
        for namespace in namespaces:
            subprocess.run(['ip', 'netns', 'del', namespace], capture_output=True)


def test_ranks_by_mpi(hosts, tmp_path):
    """Three, two of them on the first host."""
    remote_shell = tmp_path / 'remote_shell'
    remote_shell.write_text(
        '#!/bin/sh\n'
        'host=$1\n'
        'shift\n'
        f'case $host in {ADDRESSES[0]}) host={hosts[0]};; *) host={hosts[1]};; esac\n'
        'exec ip netns exec $host sh -c "$*"\n'
    )
    remote_shell.chmod(0o700)
    slots = ','.join(f'{address}:{ranks}' for address, ranks in zip(ADDRESSES, RANKS))
    start = ['ip', 'netns', 'exec', hosts[0], MPIEXEC, '-launcher', 'rsh']
    start += ['-launcher-exec', remote_shell, '-hosts', slots, '-n', str(sum(RANKS))]
    engine = available_engines()[-1]
    program = [sys.executable, f'{REPOSITORY}/tests/helpers/on_mpi.py', engine]
    output = output_of([*start, *program, 'unit/test_comm.py::test_gradients_are_averaged'])
    assert f'averaged by {engine}' in output
    assert output.count("'test_comm::test_gradients_are_averaged': 1") == 3


def test_ranks_without_a_launcher(hosts, tmp_path, monkeypatch):
    """One on each host, without names, mpi4py and Horovod. By torchrun: test_pods."""
    blocked = "import sys\nfor name in ('mpi4py', 'horovod'):\n    sys.modules[name] = None\n"
    (tmp_path / 'sitecustomize.py').write_text(blocked)
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))
    words = [*QUICK, '--ppo.total_episodes=64', f'--save_dir={tmp_path}']
    launches = [
        Launch(tmp_path / host, *words, started_by=('ip', 'netns', 'exec', host), **variables)
        for host, variables in zip(hosts, torch_variables(2, ADDRESSES[0], 29400))
    ]
    for launch in launches:
        assert launch.wait() == 0, launch.errors()
    assert '2 ranks, averaging by torch (gloo)' in launches[0].output()


class Pod:
    """A pod of docs/clusters.md on a host of its own; its processes end when `process` does."""

    def __init__(self, index, host, script, names, directory):
        self.output = directory / f'pod{index}'
        isolated = 'unshare --mount --propagation=private --uts --pid --fork --kill-child'
        preparation = f'mount --bind {names} /etc/hosts && hostname train-{index} && exec "$@"'
        self.command = ['ip', 'netns', 'exec', host, *isolated.split(), '--mount-proc']
        self.command += ['sh', '-c', preparation, 'sh', 'sh', '-c', script]
        self.environment = {**os.environ, 'JOB_COMPLETION_INDEX': str(index)}
        self.starts = 0
        self.start()

    def start(self):
        self.starts += 1
        with self.output.open('ab') as output:
            settings = {'stdout': output, 'stderr': output, 'env': self.environment}
            self.process = subprocess.Popen(self.command, **settings)


def test_pods(hosts, tmp_path):
    """A pod dies, and both go on from the last checkpoint. The first starts last."""
    yaml = pytest.importorskip('yaml')
    _, job = yaml.safe_load_all(documentation.page('docs/kubernetes.yaml'))
    (container,) = job['spec']['template']['spec']['containers']
    changes = {
        '.venv/bin/torchrun': f'{sys.executable} -m torch.distributed.run',
        '--nproc-per-node 8': '--nproc-per-node 1',
        './launch.py': f'{REPOSITORY}/launch.py',
        'descriptiveness': 'test',
        '--save_dir /runs': shlex.join([f'--save_dir={tmp_path}', *CONSOLE, *FOREVER, *QUICK]),
    }
    script = documentation.changed(container['command'][-1], changes)
    names = tmp_path / 'names'
    with names.open('w') as file:
        for index, address in enumerate(ADDRESSES):
            own = f'train-{index}.train.default.svc.cluster.local train-{index}.train train-{index}'
            print(address, own, file=file)
    pods = []

    def either_said(pattern):
        for pod in pods:
            if pod.process.poll() is not None:
                pod.start()
        return any(re.search(pattern, pod.output.read_text(errors='replace')) for pod in pods)

    try:
        for index in (1, 0):
            pods.append(Pod(index, hosts[index], script, names, tmp_path))
        eventually(lambda: either_said(r'\[ppo_step 3\]'))
        pods[0].process.kill()
        eventually(lambda: either_said(r'Going on from .*model.ckpt-\d+\n[^~]*\[ppo_step \d+\]'))
        assert all(pod.starts > 1 for pod in pods)
    finally:
        for pod in pods:
            pod.process.kill()
            pod.process.wait()
