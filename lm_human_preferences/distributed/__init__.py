"""Ranks, the processes that train together; alone knows MPI, Horovod and torch.distributed."""

ENGINES = ('auto', 'horovod', 'torch')  # for averaging gradients, see torch_comm.py
ALLREDUCE_TIMEOUT = 1800  # seconds that ranks wait for each other
