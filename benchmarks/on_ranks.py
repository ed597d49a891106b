"""Measurements of a benchmark in processes of their own, on several ranks or on one."""

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lm_human_preferences.distributed import launch_methods, meeting


def measure(size, *command):
    """Return the last line that `python COMMAND...` prints on `size` ranks, which is JSON.

    Our launcher's mpiexec starts the ranks. Each has one thread unless OMP_NUM_THREADS says
    otherwise.
    """
    prefix = launch_methods.mpiexec_words(size) if size > 1 else []
    done = subprocess.run(
        [*prefix, sys.executable, *map(str, command)],
        env={'OMP_NUM_THREADS': '1', **launch_methods.rank_environment()},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def end(world):
    """End this rank as the program does: at Python's normal exit, threads of Gloo may abort it."""
    world.close()
    meeting.leave_mpi()
    sys.stdout.flush()
    os._exit(0)
