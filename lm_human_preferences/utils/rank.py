"""One rank of a job: mpiexec runs this module with the directory that utils/ranks.py has prepared.

Where the user's own mpiexec or srun has started launch.py itself, that calls `run` instead.
"""
import contextlib
import importlib
import json
import os
import select
import shutil
import sys
import threading
import time
import traceback
from pathlib import Path

from lm_human_preferences.utils import ranks
from lm_human_preferences.utils.errors import UserError

ECHO = 0.5  # seconds in which a launcher learns that a rank has died, if this is what made others fail
FIRST_WORD = 2  # seconds that rank 0 has to name what went wrong on all ranks before the others do


class _Launcher:
    """The process that prepared `directory`, and hears what becomes of this rank."""

    def __init__(self, directory):
        self.directory = directory
        path = os.path.join(directory, f'rank-{ranks.launched_rank()}')
        self.pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # fails where nobody listens
        os.set_blocking(self.pipe, True)
        self.tell(process=os.getpid())

    def tell(self, **words):
        with contextlib.suppress(BrokenPipeError):
            os.write(self.pipe, json.dumps(words).encode() + b'\n')


def main(directory):
    """Do the job that `directory` describes."""
    launcher = _Launcher(directory)
    job = json.loads(Path(directory, 'job.json').read_text(encoding='utf-8'))
    speak_only_if_first()
    if job['columns']:  # of the terminal to which mpiexec passes on what this rank prints
        os.environ['TQDM_NCOLS'] = str(job['columns'] - 1)
        sys.stderr.isatty = lambda: True
        os.dup2(2, 1)  # lines and progress bars stay in order
    run(job['job'], job['arguments'], launcher)
    launcher.tell(done=True)


def run(job, arguments, launcher=None):
    """Do `job` (see launch.run) in this process, which is a rank; whatever ends it before its time ends all ranks.

    launcher: ours; None where somebody's own mpiexec or srun started the ranks.
    """
    threading.Thread(target=_watch, args=(os.getppid(), launcher), daemon=True).start()
    try:
        from lm_human_preferences.utils import comm
        call, hparams = function(job), arguments.get('hparams')
        if isinstance(hparams, dict):
            arguments['hparams'] = importlib.import_module(call.__module__).HParams()
            arguments['hparams'].override_from_nested_dict(hparams)
        call(**arguments, comm=comm.world(arguments['hparams'].run.allreduce if hparams else 'auto'))
    except BaseException as e:
        _fail(e, launcher)


def function(job):
    """What 'module:function' names."""
    module, name = job.split(':')
    return getattr(importlib.import_module(module), name)


def speak_only_if_first():
    """Let rank 0 write to the console, to standard output line by line, and no other."""
    if ranks.launched_rank():
        sys.stdout = sys.stderr = open(os.devnull, 'w', encoding='utf-8')
    elif ranks.launched_size() > 1:
        sys.stdout.reconfigure(line_buffering=True)


def _watch(parent, launcher):
    """End this rank, whatever it is waiting for, when mpiexec or the launcher is gone."""
    heard = select.poll()
    if launcher:
        heard.register(launcher.pipe, 0)
    while os.getppid() == parent and not heard.poll(1000):
        pass
    if launcher:
        launcher.tell(error="mpiexec's process that started this rank was killed\n", mistake=False)
        shutil.rmtree(launcher.directory, ignore_errors=True)
    os._exit(1)


def _fail(error, launcher):
    """Let the user know of `error`, once, and end all ranks."""
    mistake, interrupted = isinstance(error, UserError), isinstance(error, KeyboardInterrupt)
    text = ' '.join(str(error).splitlines()) if mistake else ''.join(traceback.format_exception(error))
    if not mistake:
        time.sleep(ECHO)
    if launcher:
        launcher.tell(error=text, mistake=mistake)
        time.sleep(60)  # the launcher ends all ranks
    elif not interrupted:
        time.sleep(FIRST_WORD if ranks.launched_rank() else 0)
        message = f'error: {text}' if mistake else f'{text}error: rank {ranks.launched_rank()} failed'
        print(message, file=sys.__stderr__)
    try:
        from lm_human_preferences.utils import comm
        comm.abort(2 if mistake else 130 if interrupted else 1)
    finally:
        os._exit(1)


if __name__ == '__main__':
    main(sys.argv[1])
