"""Re-lock with `pipenv run python tools/lock.py`: `pipenv lock`, then make the lock portable.

- No package index is recorded: pipenv falls back to the user's own.
- torch keeps its version only, neither hashes nor a local label such as +cpu, so that a CPU wheel
  serves as well as the CUDA build.
- The CUDA libraries are left out: torch pins its own and brings them along.
- One lock serves every supported Python. pipenv resolves for the Python that it runs on, so that
  has to be the oldest: a version that has dropped it would be chosen otherwise. For the others it
  is checked here that each locked version has a wheel, and that whatever only they require is
  locked as well.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PYTHONS = (
    '3.11',
    '3.12',
    '3.13',
    '3.14',
)  # the oldest first; tools/setup.sh has the same limits
NO_WHEEL = ('horovod',)  # compiled by tools/horovod.sh


def from_torch(package: str) -> bool:
    """Return whether `package` is among the CUDA libraries that torch pins and brings along."""
    return package == 'triton' or package.startswith(('nvidia-', 'cuda-'))


def portable(lock):
    """`lock` (the parsed Pipfile.lock), changed in place, without what ties it to one machine."""
    lock['_meta']['sources'] = []
    for section in (lock[name] for name in lock if name != '_meta'):
        for package, entry in list(section.items()):
            entry.pop('index', None)
            if package == 'torch':
                entry['version'] = entry['version'].split('+')[0]
                entry.pop('hashes', None)
            elif from_torch(package):
                del section[package]
    return lock


def locked_packages(lock: dict, category: str) -> dict[str, dict]:
    """Return the packages that `category` of `lock` installs, as name -> entry.

    These are its own packages and the default ones.
    """
    return lock['default'] | lock[category]


def unmet(
    lock: dict, category: str, requires: Mapping[str, list[str]], python: str
) -> Iterator[str]:
    """One line for each requirement of a package in `category` that the lock does not meet on
    `python` ('3.14').

    `requires` has the requirements of each locked package by its name, as in its metadata.
    """
    locked = locked_packages(lock, category)
    environment = {'python_version': python, 'python_full_version': f'{python}.0'}
    for package, entry in lock[category].items():
        # Without an extra, a marker compares with the empty string.
        extras = entry.get('extras', [])
        for requirement in map(Requirement, requires.get(package, [])):
            name = canonicalize_name(requirement.name)
            applies = requirement.marker is None or any(
                requirement.marker.evaluate(environment | {'extra': extra})
                for extra in ['', *extras]
            )
            if not applies or from_torch(name):
                continue
            if name not in locked:
                yield f'{package} requires {requirement} on Python {python}: add it to the Pipfile'
            elif not requirement.specifier.contains(locked[name]['version'].removeprefix('==')):
                yield (
                    f'{package} requires {requirement} on Python {python}, not'
                    f' {name}{locked[name]["version"]}'
                )


def requirement_line(package: str, entry: dict) -> str:
    """A locked package as a line of a requirements file."""
    hashes = ''.join(f' --hash={value}' for value in entry.get('hashes', []))
    return f'{package}{entry["version"]}{hashes}\n'


def wheel_metadata(lock: dict, python: str) -> dict[str, list[str]]:
    """The requirements of each locked package on `python`, by name; stops where one has no wheel
    for it.

    pip looks the wheels up, by version and hash, and installs nothing. torch has no hashes, so it
    is looked up alone.
    """
    entries = {
        package: entry
        for category in lock
        if category != '_meta'
        for package, entry in lock[category].items()
        if package not in NO_WHEEL
    }
    torch = {'torch': entries.pop('torch')}
    requires = {}
    with tempfile.TemporaryDirectory() as folder:
        wanted, report = (
            pathlib.Path(folder, 'requirements.txt'),
            pathlib.Path(folder, 'report.json'),
        )
        for packages in (entries, torch):
            wanted.write_text(''.join(requirement_line(*item) for item in packages.items()))
            subprocess.run(
                [
                    sys.executable,
                    '-m',
                    'pip',
                    'install',
                    '--quiet',
                    '--dry-run',
                    '--no-deps',
                    '--ignore-installed',
                    '--only-binary=:all:',
                    f'--python-version={python}',
                    f'--target={folder}',
                    f'--report={report}',
                    f'--requirement={wanted}',
                ],
                check=True,
            )
            for found in json.loads(report.read_text())['install']:
                metadata = found['metadata']
                requires[canonicalize_name(metadata['name'])] = metadata.get('requires_dist', [])
    return requires


def main() -> None:
    """Lock, make the lock portable, and check it for every supported Python."""
    if f'{sys.version_info[0]}.{sys.version_info[1]}' != PYTHONS[0]:
        sys.exit(
            f'error: lock with the oldest supported Python: PYTHON=python{PYTHONS[0]} sh'
            ' tools/setup.sh --dev'
        )
    # The Pipfile's hash covers the indexes in pip's configuration files as well: leave those out.
    subprocess.run(
        ['pipenv', 'lock'], check=True, env={**os.environ, 'PIP_CONFIG_FILE': os.devnull}
    )
    path = pathlib.Path('Pipfile.lock')
    lock = portable(json.loads(path.read_text()))
    path.write_text(json.dumps(lock, indent=4) + '\n')
    problems = []
    for python in PYTHONS:
        requires = wheel_metadata(lock, python)
        for category in lock:
            if category != '_meta':
                problems += unmet(lock, category, requires, python)
    if problems:
        sys.exit(
            '\n'.join(['error: Pipfile.lock does not serve every supported Python', *problems])
        )


if __name__ == '__main__':
    main()
