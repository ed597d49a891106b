"""Launcher of ranks on this host: the mpiexec that `--mpi N` becomes."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import NoReturn

from lm_human_preferences.errors import UserError

_COMMAND = 'LMHP_COMMAND'  # the words of a rank's command, in JSON
TERMINAL = 'LMHP_TERMINAL'  # tells ranks that are started here whether they print to a terminal
# The command is not in mpiexec's own words, where ':' would begin another command.
_RANK = f"""
import json, os
words = json.loads(os.environ.pop('{_COMMAND}'))
os.execv(words[0], words)
"""
_OF_OTHER_LAUNCHERS = ('OMPI_COMM_WORLD_', 'PMI_', 'PMIX_')
# The ranks are on this host, whatever a batch system offers.
_HERE = ('-rmk', 'user', '-launcher', 'fork')


def become_mpiexec(size: int) -> NoReturn:
    """Replace this process by an mpiexec that runs its command on `size` ranks of this host."""
    is_terminal = sys.stdout.isatty() and sys.stderr.isatty()
    variables = rank_environment()
    variables[_COMMAND] = json.dumps([sys.executable, *sys.orig_argv[1:]])
    variables[TERMINAL] = str(is_terminal)
    if is_terminal:  # whose width the ranks, which write into pipes, cannot ask for
        columns = shutil.get_terminal_size().columns
        variables.update(COLUMNS=str(columns), TQDM_NCOLS=str(columns - 1))
    words = [*mpiexec_words(size), sys.executable, '-c', _RANK]
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # mpiexec complains of what Python ignores
    # In the background, mpiexec would be stopped by the terminal that it reads from.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.execve(words[0], words, variables)


def mpiexec_words(size: int) -> list[str]:
    """Return what starts `size` ranks here, by the MPICH of this environment, before a command."""
    mpiexec = Path(sys.executable).with_name('mpiexec')
    if not mpiexec.exists():
        raise UserError(
            'no mpiexec to start ranks with: `sh tools/setup.sh` installs one, or use --mpi 1'
        )
    return [str(mpiexec), *_HERE, '-n', str(size)]


def rank_environment() -> dict[str, str]:
    """Return the environment of mpiexec and its ranks."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith(_OF_OTHER_LAUNCHERS)}
    # The ranks would listen on all networks, for others that there are not.
    variables.setdefault('UCX_NET_DEVICES', 'lo')
    return variables
