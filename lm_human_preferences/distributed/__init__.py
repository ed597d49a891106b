"""Many processes that train together: how they start, meet, average gradients and end.

The only room that knows MPI, Horovod and torch.distributed. Knows tensors; knows neither networks
nor what is trained.
"""
