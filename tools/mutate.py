#!/usr/bin/env python3
"""Single-line defects that a tired engineer could make, and whether the tests catch them.

    python tools/mutate.py --seed 1 --count 60              list them
    python tools/mutate.py --seed 1 --count 60 --apply 7    make the 7th in the working tree
    python tools/mutate.py --seed 1 --count 60 --run 7 -n0  run the tests with it, in a copy of HEAD
    python tools/mutate.py --seed 1 --count 60 --run all    run them with each, and count

`--run 7,9-12` takes some of them. Tests that import the file come first, and the first that fails
ends a run; `--limit 60` ends it after so many seconds in any case, and tells apart what then has
not been caught. A test that a defect makes hang fails after its own time: `--timeout 30`, of
pytest, makes that shorter.

Which ones are drawn depends on the seed and the source alone. Comparisons, numbers, arguments,
calls, conditions and signs are changed, but no texts, types or assertions. Those that change
nothing are named, with the reason, in tools/equivalent_mutants.txt, and are not run. `--quick`
leaves out slow tests. Arguments that are not options of this program are those of pytest.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from defects import PACKAGE, ROOT, Mutant, draw

EQUIVALENT = ROOT / 'tools/equivalent_mutants.txt'
QUICKEST = ('unit', 'recorded', 'commands', 'faults')  # folders of tests; not real models


def imports_of(path: Path) -> set[str]:
    """The dotted names that a file may import: modules, and what may be modules."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f'{node.module}.{alias.name}' for alias in node.names)
    return names


def distances(mutated: str) -> dict[str, int]:
    """{test file: by how many imports it gets at a file}; without those that import it not at all.

    Both are paths from the root of the repository.
    """
    modules = {}  # {dotted name: file}
    for path in ROOT.glob(f'{PACKAGE}/**/*.py'):
        name = '.'.join(path.relative_to(ROOT).with_suffix('').parts)
        modules[name.removesuffix('.__init__')] = path
    for pattern in ('*.py', 'tests/helpers/*.py', 'benchmarks/*.py'):
        modules.update({path.stem: path for path in ROOT.glob(pattern)})
    tests = sorted(ROOT.glob('tests/*/test_*.py'))
    importers: dict[Path, list[Path]] = {}
    for path in [*modules.values(), *tests]:
        for name in imports_of(path) & modules.keys():
            importers.setdefault(modules[name], []).append(path)
    found = {ROOT / mutated: 0}
    queue = [ROOT / mutated]
    for path in queue:  # which grows
        for importer in importers.get(path, []):
            if importer not in found:
                found[importer] = found[path] + 1
                queue.append(importer)
    return {path.relative_to(ROOT).as_posix(): found[path] for path in tests if path in found}


def chosen(text: str) -> list[int]:
    """The numbers that a text such as '7,9-12' names."""
    numbers = []
    for part in text.split(','):
        first, _, last = part.partition('-')
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def stages(mutated: str, is_quick: bool) -> Iterator[list[str]]:
    """Yield the arguments of one run of pytest after the other, the likeliest tests first."""
    distance = distances(mutated)
    order = {}
    for place, folder in enumerate(QUICKEST):
        for path in ROOT.glob(f'tests/{folder}/test_*.py'):
            name = path.relative_to(ROOT).as_posix()
            order[name] = distance.get(name, len(distance)), place, name
    tests = sorted(order, key=lambda name: order[name])
    near = [name for name in tests if distance.get(name) == 1]
    if near:
        yield ['-m', 'not slow', *near]
    yield ['-m', 'not slow', *tests[len(near) :]]
    if not is_quick:
        yield ['-m', 'slow', *tests]


class Copy:
    """A worktree of HEAD in a temporary directory, in which tests are run with defects."""

    def __init__(self, path: Path, arguments: Sequence[str], limit: float | None) -> None:
        self.path, self.arguments, self.limit = path, arguments, limit
        self.broken: set[str] = set()  # tests that fail without a defect as well

    def first_failure(self, mutant: Mutant, is_quick: bool) -> str | None:
        """The test that catches a defect; None where none does.

        subprocess.TimeoutExpired if none has within the limit.
        """
        end = time.monotonic() + self.limit if self.limit else None
        file = self.path / mutant.path
        text = file.read_text(encoding='utf-8')
        for stage in stages(mutant.path, is_quick):
            while True:
                file.write_text(mutant.applied_to(text), encoding='utf-8')
                try:
                    failed = self._pytest(stage, end)
                finally:
                    file.write_text(text, encoding='utf-8')
                if failed is None:
                    break
                if self._pytest([failed]) is None:
                    return failed
                print(f'    left out, as it fails without the defect: {failed}', flush=True)
                self.broken.add(failed)
        return None

    def _pytest(self, tests: Sequence[str], end: float | None = None) -> str | None:
        """The first test that fails; None if all pass. end: when this has to be done."""
        command = [sys.executable, '-m', 'pytest', '-x', '-q', '--tb=no', '-rfE', *self.arguments]
        command += [f'--deselect={test}' for test in sorted(self.broken)]
        with tempfile.TemporaryFile('w+') as output:
            process = subprocess.Popen(
                [*command, *tests],
                cwd=self.path,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(end and max(0, end - time.monotonic()))
            finally:
                with contextlib.suppress(ProcessLookupError):  # also what a defect left running
                    os.killpg(process.pid, signal.SIGKILL)
            output.seek(0)
            printed = output.read()
        if status in (0, 5):  # 5: nothing was chosen
            return None
        failed = re.search(r'^(?:FAILED|ERROR) (.+?)(?: - .*)?$', printed, re.MULTILINE)
        if failed is None:
            raise SystemExit(f'pytest has ended with status {status}:\n{printed}')
        return failed[1]


@contextlib.contextmanager
def copy_of_head() -> Iterator[Path]:
    """A worktree of HEAD, until the end of the block."""
    if git('status', '--porcelain', PACKAGE, 'tests'):
        raise SystemExit('commit your changes first: the tests are run in a copy of HEAD')
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / ROOT.name
        git('worktree', 'add', '--quiet', '--detach', str(path))
        try:
            if (ROOT / '.venv').exists():
                (path / '.venv').symlink_to((ROOT / '.venv').resolve())
            yield path
        finally:
            git('worktree', 'remove', '--force', str(path))


def git(*arguments: str) -> str:
    """Return the output of git."""
    command = ['git', '-C', str(ROOT), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def apply(mutant: Mutant) -> None:
    """Make a defect in the working tree, unless its file has changes that are not committed."""
    if git('status', '--porcelain', mutant.path):
        raise SystemExit(f'{mutant.path} has changes that are not committed')
    file = ROOT / mutant.path
    file.write_text(mutant.applied_to(file.read_text(encoding='utf-8')), encoding='utf-8')
    print(f'{mutant}\ngit checkout {mutant.path}  # takes it back')


def run(
    mutants: dict[int, Mutant], is_quick: bool, limit: float | None, arguments: Sequence[str]
) -> None:
    """Run the tests with each of the defects, and print which are caught, and by which test."""
    table = []
    with copy_of_head() as path:
        copy = Copy(path, arguments, limit)
        for number, mutant in mutants.items():
            begin = time.monotonic()
            print(f'{number:3}  {mutant}', flush=True)
            try:
                test = copy.first_failure(mutant, is_quick)
                told = f'caught by {test}' if test else 'SURVIVED'
            except subprocess.TimeoutExpired:
                told = 'NOT CAUGHT in time'
            print(f'     {told} after {time.monotonic() - begin:.0f} s', flush=True)
            table.append(f'{number:3}  {mutant.path}:{mutant.line}  {told}')
    caught = sum('  caught by ' in line for line in table)
    print('\n', *table, f'{caught} of {len(table)} caught', sep='\n')


def main() -> None:
    """Read the options, and do what they say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    parser.add_argument('--seed', type=int, default=1)
    parser.add_argument('--count', type=int, default=60)
    parser.add_argument('--apply', type=int, metavar='K')
    parser.add_argument('--run', metavar='K', help='or: 7,9-12; or: all')
    parser.add_argument('--limit', type=float, metavar='SECONDS', help='for each defect')
    parser.add_argument('--quick', action='store_true', help='leave out slow tests')
    options, arguments = parser.parse_known_args()
    if arguments and not options.run:
        parser.error(f'unknown: {" ".join(arguments)}')
    numbered = dict(enumerate(draw(options.seed, options.count), start=1))
    equivalent = EQUIVALENT.read_text(encoding='utf-8').splitlines()
    if options.apply:
        apply(numbered[options.apply])
    elif options.run:
        numbers = list(numbered) if options.run == 'all' else chosen(options.run)
        different = [k for k in numbers if numbered[k].change() not in equivalent]
        mutants = {k: numbered[k] for k in different}
        run(mutants, options.quick, options.limit, arguments)
        print(f'{len(numbers) - len(different)} more are equivalent')
    else:
        for number, mutant in numbered.items():
            print(f'{number:3}  {mutant}' + '  (equivalent)' * (mutant.change() in equivalent))


if __name__ == '__main__':
    main()
