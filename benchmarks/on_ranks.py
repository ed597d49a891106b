"""Starts the measurements of a benchmark in processes of their own, on several ranks or on one."""

import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lm_human_preferences.distributed import launcher


def start(size, *command, **more_variables):
    """Start `python COMMAND...` on `size` ranks, by our launcher's mpiexec.

    Each has one thread unless OMP_NUM_THREADS, here or in the environment, says otherwise.
    """
    mpiexec, is_open_mpi = launcher.find_mpiexec()
    variables = {
        'OMP_NUM_THREADS': '1',
        **launcher.rank_environment(is_open_mpi),
        **more_variables,
    }
    prefix = []
    if size > 1:
        prefix = [mpiexec, *launcher.mpiexec_options(is_open_mpi, size)]
    return subprocess.Popen(
        [*prefix, sys.executable, *map(str, command)],
        env=variables,
        stdout=subprocess.PIPE,
        text=True,
    )


def result_of(process):
    """Return the last line that a started process printed, which is JSON."""
    output, _ = process.communicate()
    if process.returncode:
        sys.exit(f'{process.args} ended with status {process.returncode}')
    return json.loads(output.splitlines()[-1])


def measure(size, *command, **more_variables):
    """The result of `python COMMAND...` on `size` ranks."""
    return result_of(start(size, *command, **more_variables))
