"""What the ranks of a run say to each other. The only module that knows of ranks; there is one for now."""


class SingleProcess:
    """A world of one rank: everything it would say to others is already known."""
    rank = local_rank = 0
    size = local_size = 1

    def broadcast_(self, tensors):
        """Overwrite `tensors` on all ranks with those of rank 0."""

    def mean_(self, tensors):
        """Overwrite `tensors` (gradients) with their mean over ranks."""

    def mean(self, stats):
        """The mean over ranks of each of `stats`, a dict of numbers."""
        return stats

    def gather(self, value):
        """`value` of every rank, as a list, on all ranks."""
        return [value]

    def barrier(self):
        """Wait until every rank is here."""


def world():
    """The ranks of this run."""
    return SingleProcess()
