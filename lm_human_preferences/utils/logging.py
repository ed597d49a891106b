"""A dict of named numbers in, TensorBoard and the original's console lines out."""
import os
import sys

import numpy as np
from tqdm import tqdm


def say(text):
    """Print a line above a running progress bar."""
    tqdm.write(str(text), file=sys.stdout)
    sys.stdout.flush()


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
            for name, value in stats.items():
                say(f'k =  {name} , v =  {np.float32(value) if isinstance(value, float) else value}')
            if self.writer:
                self.writer.flush()

    def close(self):
        """Write what is still buffered."""
        if self.writer:
            self.writer.close()
