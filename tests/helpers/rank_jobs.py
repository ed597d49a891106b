"""Small jobs that test launching: `python tests/helpers/rank_jobs.py JOB` starts two ranks."""

import time
import types
import warnings

from lm_human_preferences.cli import launch, program
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams import reward_options
from lm_human_preferences.utils import hyperparams, logging


def say_that_ranks_wait(comm):
    """Once all of them do: a test may then end any."""
    comm.barrier()
    print(f'{comm.size} ranks wait for ever')


def wait(comm, rank=0):
    """One rank never stops by itself; the others wait for it."""
    say_that_ranks_wait(comm)
    while comm.rank == rank:
        time.sleep(1)
    comm.barrier()


def wait_for_rank_1(comm):
    wait(comm, 1)


def wait_for_life(comm, hparams):
    """No rank stops by itself; each needs a sign of life from the others every 10 seconds."""
    say_that_ranks_wait(comm)
    while True:
        time.sleep(1)


def meet(comm, hparams):
    """Nothing more; the ranks wait for each other for 3 seconds."""


def fail(comm):
    if comm.rank == 1:
        raise ArithmeticError('rank 1 cannot count')
    comm.barrier()


def talk(comm):
    print(f'rank {comm.rank} of {comm.all_gather_object(comm.rank)} speaks')
    warnings.warn('everybody warns', stacklevel=1)
    raise UserError('/labels.json is\nnot a label file')


def draw(comm):
    bar = logging.progress(range(3), comm=comm, desc='bar')
    for i in bar:
        logging.announce(f'line {i}')


JOBS = (wait, wait_for_rank_1, wait_for_life, meet, fail, talk, draw)
RANK_TIMEOUTS = {'wait_for_life': 10, 'meet': 3}  # in seconds


def command(name):
    arguments = {}
    if name in RANK_TIMEOUTS:
        run = reward_options.RunHParams(rank_timeout=RANK_TIMEOUTS[name], allreduce='torch')
        arguments = {'hparams': types.SimpleNamespace(run=run)}
    return program.Command(
        name,
        lambda settings: launch.start_job(f'rank_jobs:{name}', arguments, settings.get('mpi', 2)),
        hyperparams.fields(launch.RankHParams),
    )


if __name__ == '__main__':
    program.Program(commands=[command(job.__name__) for job in JOBS]).main()
