"""Ranks, the processes that train together; alone knows MPI, Horovod and torch.distributed."""
