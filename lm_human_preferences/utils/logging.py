"""A dict of named numbers in, TensorBoard and the original's console lines out."""
import os
import sys

import numpy as np
from tqdm import tqdm


def say(*lines):
    """Print lines to standard output, above a running progress bar."""
    text = '\n'.join(map(str, lines))
    if sys.stderr.isatty():
        tqdm.write(text)
    else:
        print(text, flush=True)


def progress(iterable=None, *, comm, **settings):
    """A tqdm bar on rank 0; drawn often on a terminal, seldom into a file."""
    return tqdm(iterable, disable=comm.rank != 0, mininterval=0.5 if sys.stderr.isatty() else 30, **settings)


class Logger:
    """Writes every step to SAVE_DIR/tb/SUBDIR, prints every `log_interval`-th; silent on other ranks than 0.

    The original lost its last events; this one flushes with each printed step and when closed.
    """

    def __init__(self, save_dir, subdir, *, log_interval, comm, tag_prefix=''):
        self.log_interval = log_interval
        self.tag_prefix = tag_prefix
        self.active = comm.rank == 0
        self.writer = None
        if self.active and save_dir:
            from torch.utils.tensorboard import SummaryWriter
            self.writer = SummaryWriter(os.path.join(save_dir, 'tb', subdir))

    def is_due(self, step):
        """Whether this rank prints at `step`."""
        return self.active and step % self.log_interval == 0

    def log(self, stats, step):
        """Record `stats`, a dict of numbers, under `step` (from 0)."""
        if self.writer:
            for name, value in stats.items():
                self.writer.add_scalar(self.tag_prefix + name, value, step)
        if self.is_due(step):
            say(*(f'k =  {name} , v =  {_as_float32(value)}' for name, value in stats.items()))
            if self.writer:
                self.writer.flush()

    def close(self):
        """Write what is still buffered."""
        if self.writer:
            self.writer.close()


def _as_float32(value):
    """A number as numpy prints it: in float32 the digits end where the information does."""
    return str(np.float32(value)) if isinstance(value, float) else value
