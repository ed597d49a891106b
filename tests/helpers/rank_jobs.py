"""Small jobs that test launching: `python tests/helpers/rank_jobs.py JOB` starts two ranks.

ENGINE and TIMEOUT in the environment are --run.allreduce and --run.allreduce_timeout.
"""

import contextlib
import os
import sys
import time
import types
import warnings

from lm_human_preferences.cli import launch, program
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams import command_options, reward_options
from lm_human_preferences.utils import hyperparams, logging

sys.modules['lm_human_preferences.rank_jobs'] = sys.modules[__name__]  # as a job is named
TIMEOUT = int(os.environ.get('TIMEOUT', 20))


def work(comm, hparams):
    import torch

    parameter = torch.nn.Parameter(torch.ones(5))
    gradients = comm.average_gradients([parameter])
    step = 0
    while True:
        gradients.zero_grad()
        gradients.require_sync()
        (parameter * comm.rank).sum().backward()
        gradients.synchronize()
        assert set(parameter.grad.tolist()) == {0.5}
        if comm.rank == 0 and step == 3:
            print(f'{comm.size} ranks work', flush=True)
        step += 1
        time.sleep(0.05)


def fail(comm, hparams):
    if comm.rank == 1:
        raise ArithmeticError('rank 1 cannot count')
    comm.barrier()


def listening_addresses():
    """Return the addresses at which TCP ports of this process are open, as the kernel has them."""
    sockets = set()
    for each in os.listdir('/proc/self/fd'):
        with contextlib.suppress(OSError):  # the folder's own descriptor, which is closed
            sockets.add(os.readlink(f'/proc/self/fd/{each}'))
    lines = [*open('/proc/net/tcp'), *open('/proc/net/tcp6')]
    rows = [line.split() for line in lines]
    return [row[1][:-5] for row in rows if row[3] == '0A' and f'socket:[{row[9]}]' in sockets]


def talk(comm, hparams):
    print(f'rank {comm.rank} of {comm.all_gather_object(comm.rank)} speaks')
    addresses = comm.all_gather_object(' '.join(listening_addresses()))
    print('listening at', *addresses)
    warnings.warn('everybody warns', stacklevel=1)
    raise UserError('/labels.json is\nnot a label file')


def draw(comm, hparams):
    bar = logging.progress(range(3), comm=comm, desc='bar')
    for i in bar:
        logging.announce(f'line {i}')


JOBS = (work, fail, talk, draw)


def command(name):
    engine = os.environ.get('ENGINE', 'torch')
    run = reward_options.CommandRunHParams(allreduce_timeout=TIMEOUT, allreduce=engine)
    arguments = {'hparams': types.SimpleNamespace(run=run)}
    return program.Command(
        name,
        lambda settings: launch.start_job(f'rank_jobs:{name}', arguments, settings.get('mpi', 2)),
        hyperparams.fields(command_options.RankHParams),
    )


if __name__ == '__main__':
    program.Program(commands=[command(job.__name__) for job in JOBS]).main()
