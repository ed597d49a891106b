"""Ranks: processes that train together; only this package uses MPI and torch.distributed."""

ENGINES = ('auto', 'horovod', 'torch')  # choices of the library that averages gradients
ALLREDUCE_TIMEOUT = 1800  # default number of seconds that ranks wait for each other
