"""Launcher of ranks on this host: `--mpi N` replaces the process by mpiexec."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import NoReturn

from lm_human_preferences.errors import UserError

_COMMAND = 'LMHP_COMMAND'  # variable with the words of a rank's command, in JSON
TERMINAL = 'LMHP_TERMINAL'  # variable: whether the ranks' output goes to a terminal
# The command is not among mpiexec's arguments, where ':' would begin another command.
_RANK = f"""
import json, os
words = json.loads(os.environ.pop('{_COMMAND}'))
os.execv(words[0], words)
"""
_OF_OTHER_LAUNCHERS = ('OMPI_COMM_WORLD_', 'PMI_', 'PMIX_')
# Start the ranks on this host, whatever hosts a batch system offers.
_HERE = ('-rmk', 'user', '-launcher', 'fork')


def become_mpiexec(size: int) -> NoReturn:
    """Replace this process by an mpiexec that runs its command on `size` ranks of this host."""
    is_terminal = sys.stdout.isatty() and sys.stderr.isatty()
    variables = rank_environment()
    variables[_COMMAND] = json.dumps([sys.executable, *sys.orig_argv[1:]])
    variables[TERMINAL] = str(is_terminal)
    if is_terminal:  # ranks write into pipes and cannot ask for its width
        columns = shutil.get_terminal_size().columns
        variables.update(COLUMNS=str(columns), TQDM_NCOLS=str(columns - 1))
    words = [*mpiexec_words(size), sys.executable, '-c', _RANK]
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # mpiexec would complain that Python ignores it
    # No input: a terminal stops programs in the background that read from it.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.execve(words[0], words, variables)


def mpiexec_words(size: int) -> list[str]:
    """Return the words of an mpiexec for `size` ranks here, without the command of the ranks."""
    mpiexec = Path(sys.executable).with_name('mpiexec')
    if not mpiexec.exists():
        raise UserError(
            'no mpiexec to start ranks with: `sh tools/setup.sh` installs one, or use --mpi 1'
        )
    return [str(mpiexec), *_HERE, '-n', str(size)]


def rank_environment() -> dict[str, str]:
    """Return the environment of mpiexec and its ranks."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith(_OF_OTHER_LAUNCHERS)}
    # By default ranks listen on all networks, though all of them are on this host.
    variables.setdefault('UCX_NET_DEVICES', 'lo')
    return variables
