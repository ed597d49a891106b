"""`./launch.py doctor`: checks of this machine; each returns what it found, or raises UserError."""

import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from lm_human_preferences import storage
from lm_human_preferences.distributed import ENGINES, horovod, launcher, mpi_library
from lm_human_preferences.errors import UserError
from lm_human_preferences.language.gpt2 import released
from lm_human_preferences.machine import processors
from lm_human_preferences.runs.run_files import SIZES, usual_directory
from lm_human_preferences.training import memory

PACKAGES = (
    'blobfile',
    'filelock',
    'ftfy',
    'google_crc32c',
    'jinja2',
    'krippendorff',
    'matplotlib',
    'mpi4py',
    'numpy',
    'peft',
    'safetensors',
    'starlette',
    'tensorboard',
    'tiktoken',
    'torch',
    'tqdm',
    'transformers',
    'urllib3',
    'uvicorn',
)
# Pipfile.lock has wheels for these and what is between; tools/ knows the same versions.
OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 14)
SAVES = Path(usual_directory())
# GiB that a 124M run takes, with two checkpoints and micro-batches of 8.
LEAST_DISK = 10
LEAST_MEMORY = 6
LEAST_LOAD = 0.5  # processors that others keep busy, to be worth a word
PATIENCE = 180  # seconds for a training step; most of them go into starting
STEP = [
    'train_policy',
    'test',
    'doctor',
    '--save_dir=None',
    '--run.console=original',
    '--ppo.total_episodes=64',
    '--rewards.train_new_model=off',
    '--rewards.trained_model=test',
]


def _python() -> str:
    if not OLDEST_PYTHON <= sys.version_info[:2] <= NEWEST_PYTHON:
        oldest, newest = ('.'.join(map(str, version)) for version in (OLDEST_PYTHON, NEWEST_PYTHON))
        raise UserError(
            f'{sys.version} is not supported; {oldest} to {newest} are: '
            f'`PYTHON=python{newest} sh tools/setup.sh`'
        )
    return sys.version


def _packages() -> str:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f'{", ".join(missing)} missing: `sh tools/setup.sh` installs all; then start by `pipenv'
            ' run`'
        )
    import torch

    return (
        f'all there, with torch {torch.__version__} and transformers'
        f' {importlib.metadata.version("transformers")}'
    )


def _devices() -> str:
    import torch

    if count := torch.cuda.device_count():
        return f'{count} GPU(s): ' + '; '.join(
            f'{torch.cuda.get_device_name(i)}, {torch.cuda.mem_get_info(i)[0] >> 30} GiB free'
            for i in range(count)
        )
    if shutil.which('nvidia-smi'):
        raise UserError(
            f'torch {torch.__version__} sees no GPU, though there is a driver: see `nvidia-smi` and'
            ' CUDA_VISIBLE_DEVICES, or install a torch for its CUDA'
        )
    affinity = os.sched_getaffinity(0)
    found = f'no GPU, {len(affinity)} processors'
    quota = processors.cpu_quota()
    if quota is not None:
        found += f', of which this container may take {quota:g}'
    cores = processors.core_of_each(affinity)
    threads = processors.thread_count([affinity], 0, cores, quota)
    return f'{found}, of which one rank takes {min(threads, torch.get_num_threads())}'


def _products() -> str:
    import torch

    if torch.cuda.is_available():
        return 'on the GPU'
    from lm_human_preferences.machine import products, threads

    threads.limit_alone()  # as a run without other ranks
    processor = processors.this_processor()
    rates = products.measure()
    library = 'default' if rates.onednn_rounds else products.faster_library(processor)
    default, onednn = (products.name_of(name) for name in products.LIBRARIES)
    found = (
        f'{processor}: fp32 {rates.default:.3g} GFLOP/s by {default} and {rates.onednn:.3g} by'
        f' {onednn}, bf16 {rates.bf16:.3g}; {products.name_of(library)} is used for fp32'
    )
    if rates.onednn_rounds:
        found += f', as {onednn} rounds'
    if not processor.has_bf16:
        found += '; without instructions for bf16'
    elif rates.bf16 < rates.of(library):
        found += '; bf16 is slower than fp32'
    return found


def _room() -> str:
    available = memory.available_on_host() >> 30
    place = next(path for path in (SAVES, *SAVES.parents) if path.exists())
    disk = shutil.disk_usage(place).free >> 30
    found = f'{available} GiB of memory available, {disk} GiB free at {place}'
    if available < LEAST_MEMORY or disk < LEAST_DISK:
        raise UserError(
            f'{found}, but GPT-2 124M needs {LEAST_MEMORY} and {LEAST_DISK}: make room, or see'
            ' --save_dir'
        )
    _check_promises(str(SAVES), '--save_dir')
    return f'{found}, which other users cannot replace'


def _check_promises(place: str, setting: str) -> None:
    """Raise UserError if a promise against other users of this host does not hold at `place`."""
    mask = os.umask(0o077)
    os.umask(mask)
    reason = storage.open_to_others(place)
    if not mask & 0o002:
        reason = reason or f'the umask {mask:03o} lets everybody write to what is made in {place}'
    if reason:
        raise UserError(
            f'{reason}: what docs/rewards.md promises against other users of this host does not'
            f' hold; see {setting} and umask'
        )


def _load() -> str:
    busy = processors.busy_processors()
    if busy is None or busy < LEAST_LOAD:
        return 'no other process keeps the processors busy'
    return (
        f'other processes keep {busy:.1f} processors busy: threads that wait for each other spin,'
        ' so a training beside them can take several times as long (docs/troubleshooting.md)'
    )


def _cache() -> str:
    folder = storage.cache_root()
    storage.make_cache_folder(folder)
    _check_promises(folder, 'LMHP_CACHE')
    return f'{folder} is writable, {shutil.disk_usage(folder).free >> 30} GiB free'


def _store() -> str:
    if os.environ.get('LMHP_OFFLINE') == '1':
        return 'not asked, as LMHP_OFFLINE=1: only what is in the cache can be used'
    try:
        storage.stat(storage.join(released.directory_of('124M'), SIZES))
    except storage.StorageError as e:
        raise UserError(
            f'{e} and set LMHP_OFFLINE=1 (docs/files.md), or name your proxy by https_proxy'
        ) from e
    return 'labels and models can be downloaded'


def _hub() -> str:
    reason = storage.hub_problem()
    if reason is None:
        return 'models ORG/NAME can be downloaded'
    if reason.endswith('OFFLINE=1'):
        return f'not asked, as {reason}: only what is in its cache can be used'
    raise UserError(
        f'{reason}: name your proxy by https_proxy, or a mirror by HF_ENDPOINT; without it, only'
        ' models and data of hf:// and ORG/NAME are missing'
    )


def _mpi() -> str:
    path, _ = launcher.find_mpiexec()
    family = mpi_library.expected_family()
    assert family is not None
    reason = horovod.why_not(family)
    found = f'without it: {reason} (`sh tools/horovod.sh`)' if reason else 'with it'
    return f'{path} of {family.name}; ranks may average by Horovod, {found}'


def _has_suitable_horovod() -> bool:
    try:
        return not horovod.why_not(mpi_library.expected_family())
    except UserError:  # mpiexec is missing, which another check tells
        return False


def step(*options: str) -> str:
    """Take one step of the experiment `test`; several ranks leave a single GPU alone."""
    import torch

    gpus = {'CUDA_VISIBLE_DEVICES': ''} if torch.cuda.device_count() == 1 and options else {}
    script = Path(__file__).parents[2] / 'launch.py'
    command = [sys.executable, str(script), *STEP, *(options or ['--mpi=1'])]
    try:
        done = subprocess.run(
            command, env=os.environ | gpus, capture_output=True, text=True, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired as e:
        raise UserError(f'not done after {PATIENCE} s; see what {" ".join(command)} prints') from e
    if done.returncode:
        message = done.stderr.strip() or f'ended with status {done.returncode}'
        raise UserError(message.splitlines()[-1])
    step_time = re.search('step_time=.*', done.stdout)
    assert step_time is not None, 'the step printed no step_time'
    return f'done, {step_time[0]}'


def doctor() -> None:
    """Print what every check finds; SystemExit 1 if not even one rank can train."""
    checks = {
        'Python': _python,
        'packages': _packages,
        'devices': _devices,
        'matrix products': _products,
        'load': _load,
        'memory and disk': _room,
        'cache': _cache,
        'store': _store,
        'hub': _hub,
        'MPI': _mpi,
        'one rank': step,
    }
    for engine in ENGINES[1:]:
        if engine != 'horovod' or _has_suitable_horovod():
            checks[f'two by {engine}'] = functools.partial(
                step, '--mpi=2', f'--run.allreduce={engine}'
            )
    broken = set()
    for name, check in checks.items():
        try:
            print(f'ok       {name}: {check()}', flush=True)
        except Exception as e:  # whatever stops a check is what the user came to hear
            text = str(e) if isinstance(e, UserError) else f'{type(e).__name__}: {e}'
            print(f'problem  {name}: {" ".join(text.splitlines())}', flush=True)
            broken.add(name)
    print(f'{len(broken)} problem(s)' if broken else 'All is well.')
    if broken & {'packages', 'one rank'}:
        sys.exit(1)
