"""Timeouts of ranks, their launcher and batch systems; see docs/clusters.md."""

import time
from collections.abc import Callable
from dataclasses import dataclass

# How long mpiexec may take to end its ranks, and to pass on what they printed before.
EXIT_GRACE_SECONDS = 2
# How long it takes until a rank's death, or its last output, has become known to the others. A rank
# that fails waits for it, as the death of another rank may be the reason.
REPORT_GRACE_SECONDS = 0.5
# How long rank 0 has to report an error that all ranks met before the others report it, too.
RANK_0_GRACE_SECONDS = 2
# How long a rank that has reported an error waits for the launcher to end it.
LAUNCHER_GRACE_SECONDS = 60
# Between two signs of life of a rank without a launcher of ours.
BEAT_SECONDS = 2
# How long such a rank, when it is about to end, waits for the store.
LAST_WORD_SECONDS = 5
# By how much rank 0 is ahead where each rank would print the same stacks.
OTHER_STACKS_SECONDS = 5
# How long an attempt to reach the store may take, after which comes another one.
CONNECT_SECONDS = 5
# How long to try where torchrun has made the store before the ranks.
TORCHRUN_STORE_SECONDS = 60
# Waits of less are not worth a sleep, which lasts 50 microseconds at least.
SHORT_WAIT = 0.002
LONGEST_SLEEP = 0.001


@dataclass(frozen=True)
class Timeouts:
    """Timeouts in seconds: --run.rank_timeout, --run.allreduce_timeout, --run.stop_timeout."""

    rank: int = 600
    allreduce: int = 1800
    # Batch systems kill what has not ended 30 s after SIGTERM, and the end of a run takes a moment.
    stop: int = 20


DEFAULT_TIMEOUTS = Timeouts()


def stopping_message(seconds: int) -> str:
    """Return the line for a training that is asked to stop within `seconds`."""
    return (
        f'Stopping: the current step is saved if it finishes within {seconds} s; interrupt again to'
        ' stop at once'
    )


def sleep_until(is_done: Callable[[], bool]) -> None:
    """Sleep until `is_done()`; return at most 2 % of the wait, or a millisecond, later."""
    began = time.perf_counter()
    while not is_done():
        waited = time.perf_counter() - began
        if waited > SHORT_WAIT:
            time.sleep(min(waited / 50, LONGEST_SLEEP))
