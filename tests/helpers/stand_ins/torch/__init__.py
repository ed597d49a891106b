"""Stands for PyTorch in ranks that only talk to each other by MPI: importing it takes two seconds
of each."""


class Tensor:
    pass


class cuda:
    @staticmethod
    def device_count():
        return 0


def get_num_threads():
    return 1


def set_num_threads(count):
    assert count == 1
