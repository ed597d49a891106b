"""What a fresh machine installs: everything that is imported, and nothing that ties the lock to one machine."""
import ast
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PIPFILE = tomllib.loads((ROOT / 'Pipfile').read_text())
LOCK = json.loads((ROOT / 'Pipfile.lock').read_text())
PRODUCT = ['launch.py', 'sample.py', 'lm_human_preferences/**/*.py']


def imported(patterns):
    """The top-level names that the files imported from elsewhere, at any level of their code."""
    names = set()
    for path in (p for pattern in patterns for p in ROOT.glob(pattern)):
        for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition('.')[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(node.module.partition('.')[0])
    ours = {p.stem for pattern in ('*', 'tests/*', 'tests/**/*.py', 'benchmarks/*') for p in ROOT.glob(pattern)}
    return names - set(sys.stdlib_module_names) - ours


def undeclared(names, packages):
    """Those of the imported `names` that none of `packages` provides."""
    providers = importlib.metadata.packages_distributions()
    return sorted(name for name in names if not {p.lower() for p in [name, *providers.get(name, [])]} & packages)


def test_imports_are_declared():
    packages = set(PIPFILE['packages']) | {'horovod'}  # which is optional, and compiled by tools/horovod.sh
    names = imported(PRODUCT)
    assert 'torch' in names
    assert undeclared(names, packages) == []
    packages |= {*PIPFILE['dev-packages'], 'trl'}  # which a benchmark compares with, where it is installed
    assert undeclared(imported(['tests/**/*.py', 'benchmarks/*.py']), packages) == []


@pytest.mark.parametrize('section, category', [('packages', 'default'), ('dev-packages', 'develop')])
def test_lock_holds_what_the_pipfile_asks_for(section, category):
    for package, wanted in PIPFILE[section].items():
        version = wanted if isinstance(wanted, str) else wanted['version']
        locked = LOCK[category][package]['version']
        assert version in ('*', locked), package
        assert LOCK[category][package].get('hashes') or package == 'torch', package


def test_lock_is_portable():
    assert 'source' not in PIPFILE and LOCK['_meta']['sources'] == []
    assert not re.search(r'://|"index"|"file"|"path"', (ROOT / 'Pipfile.lock').read_text())
    assert '+' not in LOCK['default']['torch']['version']
    assert not [p for p in LOCK['default'] if p == 'triton' or p.startswith(('nvidia-', 'cuda-'))]


def test_ci_runs_the_readme_test_command_and_nothing_else():
    command = (ROOT / '.ci/run').read_text().strip().splitlines()[-1]
    assert (ROOT / '.ci/run').stat().st_mode & 0o111
    assert command.endswith('pytest') and f'\n    {command}\n' in (ROOT / 'README.md').read_text()


def test_ruff_is_content():
    command = [sys.executable, '-m', 'ruff', 'check', '--no-cache', '.']
    ruff = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ruff.returncode == 0, ruff.stdout


@pytest.mark.skipif('CI' not in os.environ, reason='a user may do without Horovod')
def test_ci_has_the_real_horovod():
    assert importlib.util.find_spec('horovod'), 'tools/setup.sh --dev should have compiled it'
