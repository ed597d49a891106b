"""Launcher of ranks on this host: the mpiexec that `--mpi N` becomes."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from lm_human_preferences.errors import UserError

_COMMAND = 'LMHP_COMMAND'  # the words of a rank's command, in JSON
TERMINAL = 'LMHP_TERMINAL'  # of ranks started here: whether they print to a terminal
# Through mpiexec's own command line, the word ':' would begin another command.
_RANK = f"""
import json, os
words = json.loads(os.environ.pop('{_COMMAND}'))
os.execv(words[0], words)
"""
_OF_OTHER_LAUNCHERS = ('OMPI_COMM_WORLD_', 'PMI_', 'PMIX_')


def become_mpiexec(size: int) -> NoReturn:
    """Replace this process by an mpiexec that runs its command on `size` ranks of this host."""
    mpiexec, is_open_mpi = find_mpiexec()
    is_terminal = sys.stdout.isatty() and sys.stderr.isatty()
    variables = rank_environment(is_open_mpi)
    variables[_COMMAND] = json.dumps([sys.executable, *sys.orig_argv[1:]])
    variables[TERMINAL] = str(is_terminal)
    if is_terminal:  # whose width the ranks, which write into pipes, cannot ask for
        columns = shutil.get_terminal_size().columns
        variables.update(COLUMNS=str(columns), TQDM_NCOLS=str(columns - 1))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # mpiexec complains of what Python ignores
    # In the background, mpiexec would be stopped by the terminal that it reads from.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    options = mpiexec_options(is_open_mpi, size)
    os.execve(mpiexec, [mpiexec, *options, sys.executable, '-c', _RANK], variables)


def find_mpiexec() -> tuple[str, bool]:
    """Return (path, whether it is Open MPI's) of this environment's mpiexec, else that on PATH."""
    own = Path(sys.executable).with_name('mpiexec')
    path = str(own) if own.exists() else shutil.which('mpiexec')
    if path is None:
        raise UserError(
            'no mpiexec to start ranks with: `sh tools/setup.sh` installs one, or use --mpi 1'
        )
    return path, is_of_open_mpi(path)


def is_of_open_mpi(mpiexec: str) -> bool:
    version = subprocess.run([mpiexec, '--version'], capture_output=True, text=True, check=False)
    return 'open-mpi' in version.stdout.lower()


def mpiexec_options(is_open_mpi: bool, size: int) -> list[str]:
    """Return mpiexec's options for `size` ranks on this host, whatever a batch system offers."""
    if is_open_mpi:
        options = ['--host', f'localhost:{size}', '--bind-to', 'none', '--oversubscribe']
    else:
        options = ['-rmk', 'user', '-launcher', 'fork']
    return [*options, '-n', str(size)]


def rank_environment(is_open_mpi: bool) -> dict[str, str]:
    """Return the environment of mpiexec and its ranks."""
    variables = {}
    for name, value in os.environ.items():
        if not name.startswith(_OF_OTHER_LAUNCHERS) or name.startswith('PMIX_MCA_'):
            variables[name] = value
    # MPICH's ranks would listen on all networks, for others that there are not.
    variables.setdefault('UCX_NET_DEVICES', 'lo')
    if is_open_mpi and os.geteuid() == 0:
        variables.update(OMPI_ALLOW_RUN_AS_ROOT='1', OMPI_ALLOW_RUN_AS_ROOT_CONFIRM='1')
    return variables
