"""Small jobs of several ranks, on which launching is tested: `python tests/rank_jobs.py JOB`, which starts two."""
import sys
import time
import warnings

from lm_human_preferences.utils import launch
from lm_human_preferences.utils.errors import UserError


def wait(comm):
    """Rank 0 does not stop by itself; the others wait for it."""
    print(f'{comm.size} ranks are waiting', end=' for ever\n')
    while comm.rank == 0:
        time.sleep(1)
    comm.barrier()


def fail(comm):
    """Rank 1 fails while rank 0 waits for it."""
    if comm.rank == 1:
        raise ArithmeticError('rank 1 cannot count')
    comm.barrier()


def fail_all(comm):
    """All ranks have the same to say."""
    raise ArithmeticError('nobody can count')


def run_out_of_memory(comm):
    if comm.rank == 1:
        bytearray(1 << 60)
    comm.barrier()


def find_a_mistake(comm):
    raise UserError('/labels.json is\nno label file')


def talk(comm):
    """All ranks print."""
    print(f'rank {comm.rank} speaks')
    comm.barrier()
    print(f'ranks {comm.gather(comm.rank)} spoke', file=sys.stderr if comm.rank == 0 else sys.stdout)
    warnings.warn('everybody warns', stacklevel=1)


def main():
    jobs = [name for name, value in globals().items() if getattr(value, '__module__', None) == '__main__']
    launch.Program(commands=[
        launch.Command(name, lambda settings, name=name: launch.run(f'rank_jobs:{name}', {}, settings.get('mpi', 2)),
                       launch.hyperparams.fields(launch.RankHParams)) for name in jobs]).main()


if __name__ == '__main__':
    main()
