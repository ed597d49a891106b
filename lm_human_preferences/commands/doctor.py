"""Command `doctor`: check this machine. A check returns what it found, or raises UserError."""

import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from lm_human_preferences import storage
from lm_human_preferences.distributed import ENGINES, horovod, launch_methods
from lm_human_preferences.errors import UserError
from lm_human_preferences.machine import hardware
from lm_human_preferences.runs.run_files import usual_directory

ROOT = Path(__file__).parents[2]
# GiB that a run of GPT-2 124M needs, with two checkpoints and micro-batches of 8.
LEAST_DISK = 10
LEAST_MEMORY = 6
PATIENCE = 180  # timeout in seconds of the program that runs one training step
STEP = (
    'train_policy test doctor --save_dir=None --run.console=original --ppo.total_episodes=64'
    ' --rewards.train_new_model=off --rewards.trained_model=test'
)


def _packages() -> str:
    names = tomllib.loads((ROOT / 'Pipfile').read_text('utf-8'))['packages']
    versions = {name: importlib.metadata.version(name) for name in names}
    return (
        f'Python {platform.python_version()}, torch {versions["torch"]}, transformers'
        f' {versions["transformers"]}'
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
            ' CUDA_VISIBLE_DEVICES, or install a torch for the CUDA of this driver'
        )
    return f'no GPU, {len(os.sched_getaffinity(0))} processors'


def _room() -> str:
    storage.make_cache_folder(storage.cache_root())
    place = storage.existing_part(usual_directory())
    memory_free, disk_free = hardware.available_memory() >> 30, storage.free_bytes(place) >> 30
    found = f'{memory_free} GiB of memory available, {disk_free} GiB free at {place}'
    if memory_free < LEAST_MEMORY or disk_free < LEAST_DISK:
        raise UserError(
            f'{found}, but GPT-2 124M needs {LEAST_MEMORY} GiB of memory and {LEAST_DISK} GiB of'
            ' disk: make room, or choose another disk by --save_dir'
        )
    return found


def _mpi() -> str:
    path, *_ = launch_methods.mpiexec_words(2)
    has_horovod = horovod.is_usable(launch_methods.MPICH)
    engine = 'Horovod' if has_horovod else 'torch, as Horovod is not compiled (tools/horovod.sh)'
    return f'{path} of MPICH; ranks average by {engine}'


def step(*options: str) -> str:
    """Run a training step of the experiment `test`, on CPUs if ranks would share a single GPU."""
    import torch

    gpus = {'CUDA_VISIBLE_DEVICES': ''} if torch.cuda.device_count() == 1 and options else {}
    words = [*STEP.split(), *(options or ['--mpi=1'])]
    command = [sys.executable, str(ROOT / 'launch.py'), *words]
    done = subprocess.run(
        command, env=os.environ | gpus, capture_output=True, text=True, timeout=PATIENCE
    )
    if done.returncode:
        message = done.stderr.strip() or f'ended with status {done.returncode}'
        raise UserError(f'the training step failed: {message.splitlines()[-1]}')
    step_time = re.search('step_time=.*', done.stdout)
    assert step_time is not None, 'the step printed no step_time'
    return f'done, {step_time[0]}'


def doctor() -> None:
    """Print what each check finds; exit with status 1 if not even one rank can train."""
    checks = {
        'packages': _packages,
        'devices': _devices,
        'memory and disk': _room,
        'MPI': _mpi,
        'one rank': step,
    }
    for engine in ENGINES[1:]:
        if engine != 'horovod' or importlib.util.find_spec(engine) is not None:
            options = ('--mpi=2', f'--run.allreduce={engine}')
            checks[f'two by {engine}'] = functools.partial(step, *options)
    broken = set()
    for name, check in checks.items():
        try:
            print(f'ok       {name}: {check()}', flush=True)
        except Exception as e:  # any error is reported as a problem
            text = str(e) if isinstance(e, UserError) else f'{type(e).__name__}: {e}'
            print(f'problem  {name}: {" ".join(text.splitlines())}', flush=True)
            broken.add(name)
    problems = f'{len(broken)} problem(s). `sh tools/setup.sh` installs packages that are missing.'
    print(problems if broken else 'All is well.')
    if broken & {'packages', 'one rank'}:
        sys.exit(1)
