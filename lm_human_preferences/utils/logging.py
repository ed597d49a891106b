"""A dict of named numbers in, TensorBoard and the original's console lines out."""
import glob
import os
import sys

import numpy as np
from tqdm import tqdm

from lm_human_preferences.utils.tf_table import masked_crc


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
        self.directory = os.path.join(save_dir, 'tb', subdir) if self.active and save_dir else None
        self.writer = self.first_step = None

    def rewind(self, step):
        """Forget what a run that was interrupted has logged from `step` on; before anything is logged."""
        if self.directory:
            _cut_events(self.directory, step)
        self.first_step = step  # tells a TensorBoard that is running

    def is_due(self, step):
        """Whether this rank prints at `step`."""
        return self.active and step % self.log_interval == 0

    def log(self, stats, step):
        """Record `stats`, a dict of numbers, under `step` (from 0)."""
        if self.directory and not self.writer:
            from torch.utils.tensorboard import SummaryWriter
            self.writer = SummaryWriter(self.directory, purge_step=self.first_step)
        if self.writer:
            for name, value in stats.items():
                self.writer.add_scalar(self.tag_prefix + name, value, step)
        if self.is_due(step):
            say(*(f'k =  {name} , v =  {_as_float32(value)}' for name, value in stats.items()))
            self.flush()

    def flush(self):
        """Write what was logged so far."""
        if self.writer:
            self.writer.flush()

    def close(self):
        """Write what is still buffered."""
        if self.writer:
            self.writer.close()


def _cut_events(directory, step):
    """Cut TensorBoard's files off before the first event of `step` or later, or where a kill has left half of one."""
    from tensorboard.compat.proto.event_pb2 import Event
    for path in glob.glob(os.path.join(glob.escape(directory), 'events.out.tfevents.*')):
        with open(path, 'rb+') as f:
            data, end = f.read(), 0
            while end < len(data):  # of a record: its length, a checksum of that, the event, a checksum of that
                after = end + 16 + int.from_bytes(data[end:end + 8], 'little')
                event, crc = data[end + 12:after - 4], data[after - 4:after]
                if masked_crc(event) != int.from_bytes(crc, 'little') or Event.FromString(event).step >= step:
                    break
                end = after
            f.truncate(end)
        if not end:
            os.remove(path)


def _as_float32(value):
    """A number as numpy prints it: in float32 the digits end where the information does."""
    return str(np.float32(value)) if isinstance(value, float) else value
