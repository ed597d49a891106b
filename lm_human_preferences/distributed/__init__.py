"""Ranks: processes that train together; only this package uses MPI and torch.distributed."""

ENGINES = ('auto', 'horovod', 'torch')  # libraries that average gradients, see torch_comm.py
ALLREDUCE_TIMEOUT = 1800  # seconds that ranks wait for each other
