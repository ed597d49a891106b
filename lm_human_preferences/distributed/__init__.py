"""Many processes that train together: how they start, find each other, average gradients and end.

The only room that knows MPI, Horovod and torch.distributed. It knows tensors, but neither networks
nor what is trained.
"""
