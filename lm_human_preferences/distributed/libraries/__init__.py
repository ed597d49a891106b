"""Which MPI and which Horovod this machine has, and which of them suit the ranks that there are.

Knows files of libraries, not what ranks do with them.
"""
