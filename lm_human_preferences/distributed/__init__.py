"""Ranks, the processes that train together; alone knows MPI, Horovod and torch.distributed."""

ENGINES = ('auto', 'horovod', 'torch', 'mpi', 'gloo')  # that average over ranks, see engines.py
