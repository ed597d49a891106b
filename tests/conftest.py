"""Settings for all tests: few threads, fixed seeds, GPT-2's BPE files where available, no forks."""

import gc
import os
import random
import signal
import sys
import traceback

import surroundings  # first: libraries take caches from the environment

os.environ.setdefault('OMP_NUM_THREADS', '1')
# Ranks that wait for each other sleep meanwhile: there are more of them than processors.
os.environ.setdefault('MPIR_CVAR_CH4_PROGRESS_THROTTLE', '1')
# The tests start hundreds of processes: each would compile the package anew.
os.environ.pop('PYTHONDONTWRITEBYTECODE', None)

# It would import trio, which nothing here uses and selenium brings.
os.environ['HYPOTHESIS_NO_PLUGINS'] = '1'

# What was recorded, and what is compared to the bit, is of processors: only tests/gpu sees a GPU.
if 'LMHP_TEST_GPU' not in os.environ:
    os.environ['CUDA_VISIBLE_DEVICES'] = ''

# As in a shell where the environment is active: there the commands that are printed are short.
os.environ.pop('PIPENV_ACTIVE', None)
os.environ['PATH'] = os.pathsep.join([os.path.dirname(sys.executable), os.environ['PATH']])

import hypothesis
import pytest
from golden_data import bpe_directory

from lm_human_preferences.utils.logging import configure_console

pytest_plugins = ['command_line', 'leftovers', 'limits', 'scheduling']
pytest_plugins += ['blobserver.fixtures', 'hub_server', 'slurm_cluster']

gc.disable()  # until all tests are collected, see there
hypothesis.settings.load_profile(
    'ci'
)  # the same inputs each time; `--hypothesis-profile default` draws new ones

# No test asks the real hub: nobody answers here. The fixture hub_server is one that does.
os.environ['HF_ENDPOINT'] = 'http://127.0.0.1:9'
for _name in ('HF_TOKEN', 'HF_HUB_OFFLINE', 'TRANSFORMERS_OFFLINE'):
    os.environ.pop(_name, None)

if bpe_directory() is not None:
    os.environ['LMHP_GPT2_ENCODINGS'] = str(bpe_directory())

# Shells let jobs in the background ignore SIGINT, and nohup SIGHUP. Children would inherit that,
# but not a handler.
for _number in signal.SIGINT, signal.SIGHUP:
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)


def pytest_collection_modifyitems(items):
    """Begin with slow tests, so that none is last when the other workers have nothing to do."""
    items.sort(key=lambda item: item.get_closest_marker('slow') is None)


def pytest_collection_finish():
    """What is here now stays: looking for garbage in it would take seconds of the tests' time."""
    import torch  # here: it takes seconds, and the process that only hands out tests needs none

    torch.set_num_threads(1)
    gc.freeze()
    gc.enable()


_forks = []


def _refuse_to_fork():
    raise RuntimeError(
        'a fork of pytest has the locks of threads that it has not: use interrupted.run or'
        ' subprocess'
    )


os.fork = os.forkpty = _refuse_to_fork
os.register_at_fork(
    before=lambda: _forks.append(''.join(traceback.format_stack()))
)  # preexec_fn comes here as well


@pytest.fixture(autouse=True, scope='session')
def nowhere_of_the_users():
    """Let tests stand in an empty folder, and find nothing that another test has left there."""
    before = os.getcwd()
    surroundings.make()
    os.chdir(surroundings.HERE)
    yield
    os.chdir(before)


@pytest.fixture(autouse=True)
def ordinary_process():
    """What a test has set up of this process, as a training in it does, ends with the test."""
    import torch

    from lm_human_preferences.machine import precision

    with precision.plain():
        yield
    torch.set_num_threads(1)
    configure_console('summary')
    surroundings.empty()


@pytest.fixture
def path(tmp_path):
    """Place of a folder of labels that a test makes."""
    return tmp_path / 'f'


@pytest.fixture
def chance(request):
    """Random numbers of a test that interrupts at random; LMHP_TEST_SEED repeats a failure."""
    seed = os.environ.get('LMHP_TEST_SEED', str(random.randrange(10**6)))
    print(f'LMHP_TEST_SEED={seed}')
    return random.Random(f'{seed} {request.node.name}')


@pytest.fixture(autouse=True)
def no_forks_and_no_children_left():
    """Fail a test that has forked this process, and end trainings that it has left running."""
    yield
    if launched := sys.modules.get('launched'):
        launched.end_what_was_started()
    forks = [*_forks]
    _forks.clear()
    assert not forks, f'pytest was forked:\n{forks[0]}'
