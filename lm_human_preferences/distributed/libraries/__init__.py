"""MPI and Horovod libraries of this machine, and their compatibility with the ranks."""
