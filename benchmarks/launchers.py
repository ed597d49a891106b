#!/usr/bin/env python3
"""Trainings under each launcher and engine that are killed, stopped and started at once: a table.

    pipenv run python benchmarks/launchers.py [--kills 10] [--terms 5] [--only NAME,...]
        [--start-up]

Each row is an engine under a launcher, with two ranks of the embedded experiment:

    recordings  tests of two ranks against recordings, and one rank against two
    kills       a rank, chosen at random, is killed at a random step: all processes end, with an
                error; the last checkpoint is whole
    terms       the launcher gets SIGTERM at a random step: the same, and where it passes that on,
                the ranks say which step they have saved
    at once     two runs started together end with the same parameters, to the bit
    start-up    seconds from the command to the end of the first PPO step, and for comparison those
                of the same launcher for `python -c 'import torch'`; --start-up measures only this

It prints how many of them went as they should, and the longest time until all processes had ended.
A process left after END_SECONDS is a failure, and is killed. The launchers are those of
tests/helpers/real_launchers.py that this machine has, the engines those that suit each; a cluster
of Slurm is started for it.
"""

import argparse
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / 'tests/helpers'))

import slurm_cluster
from engines import ENGINES, OF_EACH_ENGINE, OF_ONE_ENGINE, on_mpi_command
from launched import FOREVER, SMALL, Launch, end_what_was_started
from real_launchers import LAUNCHERS, Launcher, Missing, run, send_sigterm

from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.tf_bundle import Bundle

END_SECONDS = 60
START_REPEATS = 3
RANDOM_STEPS = range(1, 30)


def start(launcher: Launcher, engine: str, directory: Path, *words: str) -> Launch:
    directory.mkdir(parents=True)
    words = (*launcher.words, f'--run.allreduce={engine}', *SMALL, *words)
    return Launch(directory, *words, started_by=launcher.command, **launcher.variables)


def start_up(launcher: Launcher, engine: str, directory: Path) -> str:
    """Seconds to the first PPO step, and to `import torch` alone: medians of START_REPEATS."""
    first_step, only_import = [], []
    for i in range(START_REPEATS):
        since = time.monotonic()
        launch = start(launcher, engine, directory / str(i), *FOREVER, '--run.log_interval=1')
        launch.reach(1)
        first_step.append(time.monotonic() - since)
        launch.process.terminate()
        seconds_until_ended(launch)
        since = time.monotonic()
        imports = run(launcher, ['-c', 'import torch'], timeout=END_SECONDS)
        imports.check_returncode()
        only_import.append(time.monotonic() - since)
    return f'{statistics.median(first_step):.1f} s, {statistics.median(only_import):.1f} s'


def recordings_pass(launcher: Launcher, engine: str, directory: Path) -> bool:
    """Return whether two ranks compute what was recorded of the original, and one rank as well."""
    _, *command = on_mpi_command(engine, [*OF_EACH_ENGINE, *OF_ONE_ENGINE])
    directory.mkdir(parents=True)
    tests = run(launcher, command, variables={'TMPDIR': str(directory)})
    if tests.returncode:
        print(tests.stdout[-3000:], tests.stderr[-3000:], file=sys.stderr)
    return tests.returncode == 0


def seconds_until_ended(launch: Launch) -> float:
    """Until no process of it is left; AssertionError after END_SECONDS."""
    since = time.monotonic()
    status = launch.wait(END_SECONDS)
    launch.assert_nothing_left(END_SECONDS)
    assert status != 0, 'ended with status 0'
    return time.monotonic() - since


def interrupt(launcher: Launcher, engine: str, directory: Path, *, kill: bool) -> float:
    """Kill a rank, or end the launcher by SIGTERM; seconds until all have ended."""
    launch = start(launcher, engine, directory, *FOREVER)
    launch.reach(random.choice(RANDOM_STEPS))
    time.sleep(random.random() / 10)
    if kill:
        os.kill(random.choice(launch.ranks()), signal.SIGKILL)
    else:
        send_sigterm(launcher, launch)
    seconds = seconds_until_ended(launch)
    assert 'Traceback (most recent call last)' not in own_errors(launch), launch.errors()
    latest = checkpoints.latest(str(launch.run / 'policy/checkpoints'))
    assert latest is not None, 'no checkpoint was saved'
    bundle = Bundle(latest)
    assert all(bundle[name] is not None for name in bundle)
    if not kill and launcher.passes_sigterm:
        assert re.search(launch.saved_step(), launch.errors()), launch.errors()
    return seconds


def own_errors(launch: Launch) -> str:
    """Return the output of the ranks before torchrun's own traceback."""
    return launch.errors().partition('torch/distributed/elastic')[0]


def same_at_once(launcher: Launcher, engine: str, directory: Path) -> bool:
    """Return whether two runs that start together end with the same parameters."""
    short = '--ppo.total_episodes=256'
    runs = [start(launcher, engine, directory / str(i), short) for i in range(2)]
    found = []
    for launch in runs:
        assert launch.wait(600) == 0, launch.errors()
        launch.assert_nothing_left(END_SECONDS)
        bundle = Bundle(str(launch.run / 'policy/checkpoints/model.ckpt-4'))
        found.append({name: bundle[name].tobytes() for name in bundle if 'policy/' in name})
    return found[0] == found[1]


def count(times: int, attempt: Callable[[Path], float], directory: Path) -> str:
    """Return a line: attempts that went well, all attempts, and the longest time of one."""
    seconds = []
    for i in range(times):
        try:
            seconds.append(attempt(directory / str(i)))
        except AssertionError as error:
            print(f'{directory.name} {i}: {error}', file=sys.stderr)
        except subprocess.TimeoutExpired as error:
            print(f'{directory.name} {i}: a hang: {error}', file=sys.stderr)
        end_what_was_started()
        shutil.rmtree(directory / str(i), ignore_errors=True)
    return f'{len(seconds)}/{times} {max(seconds, default=0):5.1f} s'


def measure(
    name: str, launcher: Launcher, engine: str, args: argparse.Namespace, directory: Path
) -> None:
    """Print the row of an engine under a launcher."""
    started = start_up(launcher, engine, directory / 'started')
    if args.start_up:
        print(f'{name:19} {engine:8} {started}', flush=True)
        return
    recorded = 'yes' if recordings_pass(launcher, engine, directory / 'recordings') else 'NO'
    kills = count(
        args.kills,
        lambda path: interrupt(launcher, engine, path, kill=True),
        directory / 'kills',
    )
    terms = count(
        args.terms,
        lambda path: interrupt(launcher, engine, path, kill=False),
        directory / 'terms',
    )
    at_once = 'yes' if same_at_once(launcher, engine, directory / 'once') else 'NO'
    row = f'{name:19} {engine:8} {recorded:10} {kills:13} {terms:13} {at_once:8} {started}'
    print(row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--kills', type=int, default=10)
    parser.add_argument('--terms', type=int, default=5)
    parser.add_argument('--only', default=','.join(LAUNCHERS), help='launchers, by name')
    parser.add_argument('--engines', default=','.join(ENGINES))
    parser.add_argument('--start-up', action='store_true', help='measure nothing else')
    parser.add_argument('--seed', type=int, default=random.randrange(10**6))
    args = parser.parse_args()
    random.seed(args.seed)
    print(f'seed {args.seed}')
    columns = 'recordings kills         terms         at once  start-up'
    print('launcher            engine  ', 'start-up' if args.start_up else columns, flush=True)
    with slurm_cluster.on_demand() as cluster:
        for name in args.only.split(','):
            try:
                launcher = LAUNCHERS[name](cluster)
            except Missing as missing:
                print(f'{name:19} {missing}')
                continue
            for engine in launcher.engines():
                if engine in args.engines.split(','):
                    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
                        measure(name, launcher, engine, args, Path(directory))


if __name__ == '__main__':
    sys.exit(main())
