"""Ranks: processes that train together by MPI, Horovod or torch.distributed, used only here."""

ENGINES = ('auto', 'horovod', 'torch')  # for averaging gradients, see torch_comm.py
ALLREDUCE_TIMEOUT = 1800  # seconds that ranks wait for each other
