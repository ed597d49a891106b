"""Installation on a fresh machine: all that is imported, nothing tied to one machine."""

import ast
import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from documentation import tool

ROOT = Path(__file__).parents[2]
PIPFILE = tomllib.loads((ROOT / 'Pipfile').read_text())
LOCK = json.loads((ROOT / 'Pipfile.lock').read_text())
CATEGORIES = [category for category in LOCK if category != '_meta']
PRODUCT = ['launch.py', 'sample.py', 'lm_human_preferences/**/*.py']


def imported(patterns):
    names = set()
    for path in (p for pattern in patterns for p in ROOT.glob(pattern)):
        for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition('.')[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(node.module.partition('.')[0])
    for pattern in ('*', 'tests/helpers/*', 'tests/**/*.py', 'benchmarks/*'):
        names -= {path.stem for path in ROOT.glob(pattern)}
    return names - set(sys.stdlib_module_names)


def undeclared(names, packages, providers):
    known = {name: {p.lower() for p in [name, *providers.get(name, [])]} for name in names}
    return sorted(name for name in names if not known[name] & packages)


def test_imports_are_declared():
    # What transformers brings, in the versions that it needs; and horovod, which is optional, and
    # compiled by tools/horovod.sh.
    packages = {*PIPFILE['packages'], 'tokenizers', 'huggingface_hub', 'horovod'}
    names = imported(PRODUCT)
    assert 'torch' in names
    providers = importlib.metadata.packages_distributions()
    assert undeclared(names, packages, providers) == []
    packages |= {*PIPFILE['dev-packages'], 'trl'}  # with which a benchmark compares, if it is there
    names = imported(['tests/**/*.py', 'benchmarks/*.py'])
    assert undeclared(names, packages, providers) == []


@pytest.mark.parametrize(
    'section, category', [('packages', 'default'), ('dev-packages', 'develop')]
)
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


def test_supported_pythons_are_the_same_everywhere():
    script = (ROOT / 'tools/setup.sh').read_text()
    found = {name: re.search(rf'^{name}=(\d+)$', script, re.M) for name in ('oldest', 'newest')}
    oldest, newest = (int(each[1]) for each in found.values())
    assert tuple(f'3.{minor}' for minor in range(oldest, newest + 1)) == tool('lock').PYTHONS
    for minor in range(oldest, newest + 1):
        assert f'python3.{minor}' in script, 'tools/setup.sh does not look for it'


def test_lock_meets_what_packages_require_on_every_python():
    lock = tool('lock')
    locked = {package for category in CATEGORIES for package in LOCK[category]}
    installed = {each for each in locked if any(importlib.metadata.distributions(name=each))}
    assert set(LOCK['default']) <= installed
    requires = {package: importlib.metadata.requires(package) or [] for package in installed}
    for python in lock.PYTHONS:
        for category in CATEGORIES:
            assert list(lock.unmet(LOCK, category, requires, python)) == []


# A command that claims to be the Python of some version. It runs the program that it is given by
# standard input with that version, and says what environment it was asked to make, whereupon
# tools/setup.sh ends with its status.
FAKE_PYTHON = """#!/bin/sh
case "$*" in
    -) exec {python} -c 'import sys; sys.version_info = {version}; exec(sys.stdin.read())' ;;
    '-c import ensurepip, venv') exit {no_venv} ;;
    --version) echo 'Python {version}' ;;
    '-m venv '*) echo "$0 -m venv $3${{4:+ $4}}"; exit 9 ;;
    '-m pip '*) echo "$*" >> log ;;
    '-c import json;'*) echo torch==2 ;;
    '-c import '*) ;;
    *) echo "unexpected: $*" >&2; exit 99 ;;
esac
"""


@pytest.fixture
def setup(tmp_path):
    return FakeProject(tmp_path)


class FakeProject:
    def __init__(self, root):
        self.root, self.bin = root / 'project', root / 'bin'
        (self.root / 'tools').mkdir(parents=True)
        self.bin.mkdir()
        shutil.copy(ROOT / 'tools/setup.sh', self.root / 'tools')
        for program in ('cat', 'chmod', 'dirname', 'grep'):
            (self.bin / program).symlink_to(shutil.which(program))

    def add(self, path, minor, has_venv=True):
        path = self.bin / path
        path.parent.mkdir(parents=True, exist_ok=True)
        facts = dict(version=(3, minor, 1), no_venv=int(not has_venv))
        path.write_text(FAKE_PYTHON.format(python=sys.executable, **facts))
        path.chmod(0o755)
        return path

    def add_venv(self, minor):
        self.add(self.root / '.venv/bin/python', minor)
        (self.root / '.venv/bin/pip').write_text(f'#!{self.root.resolve()}/.venv/bin/python\n')

    def run(self, **environment):
        words = [shutil.which('sh'), self.root / 'tools/setup.sh']
        environment = {'PATH': str(self.bin), **environment}
        done = subprocess.run(words, capture_output=True, text=True, env=environment)
        return done.returncode, done.stdout.rpartition('\n')[0].rpartition('\n')[2], done.stderr

    def chosen(self, **environment):
        status, output, error = self.run(**environment)
        assert (status, error) == (9, '')
        command, _, arguments = output.partition(' ')
        assert arguments == '-m venv --clear .venv'
        return command

    def keeps_venv(self, **environment):
        status, output, error = self.run(**environment)
        assert (status, error) == (9, '')
        return output == '.venv/bin/python -m venv --without-pip .venv/pipenv'


def test_setup_takes_the_newest_supported_python(setup):
    for name, minor in {'python3.12': 12, 'python3.13': 13, 'python3': 15, 'python': 10}.items():
        setup.add(name, minor)
    assert setup.chosen() == str(setup.bin / 'python3.13')


def test_setup_says_which_pythons_there_may_be(setup):
    setup.add('python3', 10)
    setup.add('python', 15)
    status, _, error = setup.run()
    assert status == 2 and not (setup.root / '.venv').exists()
    tried = 'python3.14 python3.13 python3.12 python3.11 python3 python'
    assert error.startswith(f'error: found no Python 3.11 to 3.14 (tried: {tried}); ')


def test_setup_says_which_package_brings_ensurepip(setup):
    setup.add('python3.12', 12, has_venv=False)
    setup.add('python3', 12, has_venv=False)
    status, _, error = setup.run()
    assert status == 2
    assert error.startswith('error: Python 3.12 has no ensurepip, ')
    assert error.endswith(': apt install python3.12-venv\n')
    setup.add('python3.11', 11)
    assert setup.chosen() == str(setup.bin / 'python3.11')


def test_setup_takes_the_python_that_is_named(setup):
    setup.add('python3.13', 13)
    elsewhere = setup.add(setup.root / 'somewhere/python', 11)
    assert setup.chosen(PYTHON=str(elsewhere)) == str(elsewhere)
    old = setup.add('python3.10', 10)
    status, _, error = setup.run(PYTHON=str(old))
    assert status == 2 and error.startswith(f'error: found no Python 3.11 to 3.14 (tried: {old});')


def test_setup_keeps_a_venv_of_a_supported_python(setup):
    setup.add_venv(12)
    setup.add('python3.13', 13)
    same = setup.add('python3.12', 12)
    assert setup.keeps_venv() and setup.keeps_venv(PYTHON=str(same))
    assert setup.chosen(PYTHON='python3.13') == str(setup.bin / 'python3.13')
    assert setup.run(PYTHON='python3.10')[0] == 2 and setup.keeps_venv()


def test_setup_makes_a_venv_that_was_moved_again(setup):
    setup.add_venv(13)
    setup.add('python3.13', 13)
    assert setup.keeps_venv()
    setup.root = setup.root.rename(setup.root.with_name('moved'))
    assert setup.chosen() == str(setup.bin / 'python3.13')


def test_setup_installs_what_torch_needs_by_pipenv_which_checks_hashes(setup):
    setup.add_venv(12)
    pipenv = setup.root / '.venv/pipenv/bin/pipenv'
    pipenv.parent.mkdir(parents=True)
    pipenv.write_text('#!/bin/sh\necho "pipenv $*" >> log\n')
    pipenv.chmod(0o755)
    assert setup.run()[0] == 0
    assert (setup.root / 'log').read_text().splitlines() == [
        '-m pip install --no-deps torch==2',
        'pipenv sync',
        '-m pip install torch==2',
    ]
