"""Re-lock with `pipenv run python tools/lock.py`: `pipenv lock`, then make the lock portable.

- No package index is recorded: pipenv falls back to the user's own.
- torch keeps its version only, neither hashes nor a local label such as +cpu, so that a CPU wheel serves as well as
  the CUDA build.
- The CUDA libraries are left out: torch pins its own and brings them along.
"""
import json
import os
import pathlib
import subprocess


def portable(lock):
    """`lock` (the parsed Pipfile.lock), changed in place, without what ties it to one machine."""
    lock['_meta']['sources'] = []
    for section in (lock[name] for name in lock if name != '_meta'):
        for package, entry in list(section.items()):
            entry.pop('index', None)
            if package == 'torch':
                entry['version'] = entry['version'].split('+')[0]
                entry.pop('hashes', None)
            elif package == 'triton' or package.startswith(('nvidia-', 'cuda-')):
                del section[package]
    return lock


if __name__ == '__main__':
    # The Pipfile's hash covers the indexes in pip's configuration files as well: leave those out.
    subprocess.run(['pipenv', 'lock'], check=True, env={**os.environ, 'PIP_CONFIG_FILE': os.devnull})
    path = pathlib.Path('Pipfile.lock')
    path.write_text(json.dumps(portable(json.loads(path.read_text())), indent=4) + '\n')
