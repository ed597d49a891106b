"""Rooms of the package (docs/architecture.md): imports between them and of libraries."""

import ast
import graphlib
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = 'lm_human_preferences'
MOST_FILES = 13  # in one folder
PAGE = (REPOSITORY / 'docs/architecture.md').read_text(encoding='utf-8')
DRAWING = PAGE.partition('## The rooms')[2].partition('\n## ')[0]
# Lowest first. A module may import from its own room and from those before it; scripts come last.
ROOMS = [*re.findall(r'^    ([a-z_]+)/?  ', DRAWING, re.MULTILINE)[::-1], 'launch', 'sample']
# The rooms that may import a library or a module of ours. `horovod` includes `horovod.torch`.
ONLY = {
    'mpi4py': 'distributed',
    'horovod': 'distributed',
    'torch.distributed': 'distributed',
    'blobfile': 'storage',
    'huggingface_hub': 'storage report',  # in the latter for model cards
    'starlette': 'labels',
    'uvicorn': 'labels',
    # Other rooms know what every network can do: language/networks/network.py.
    f'{PACKAGE}.language.causal_lm.network': 'language',
}
# What the original's checkpoints call tensors
ORIGINAL_NAMES = re.compile(
    r'model/(wte|wpe|ln_f|heads|h[\d{])|reward_norm/|/adam\b|beta\d_power|ppo_opt|minibatch/opt'
    r"|'global_step'"
)


def module_name(path):
    parts = path.relative_to(REPOSITORY).with_suffix('').parts
    return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


def room_of(module):
    """The entry of ROOMS that a module belongs to; None for the package itself, which is empty."""
    name = module.removeprefix(PACKAGE).lstrip('.')
    return name.partition('.')[0] or None


class Imports(ast.NodeVisitor):
    """Collects imported dotted names; `torch.distributed` also as an attribute of torch."""

    def __init__(self, path):
        self.names = set()
        self.visit(ast.parse(path.read_text('utf-8')))

    def visit_Import(self, node):
        self.names.update(alias.name for alias in node.names)

    def visit_ImportFrom(self, node):
        assert not node.level, 'names are absolute'
        self.names.update(f'{node.module}.{alias.name}' for alias in node.names)

    def visit_Attribute(self, node):
        name = ast.unparse(node)
        if name in ONLY:
            self.names.add(name)
        self.generic_visit(node)


@pytest.fixture(scope='module')
def files():
    found = [*REPOSITORY.glob('*.py'), *REPOSITORY.glob(f'{PACKAGE}/**/*.py')]
    return {module_name(path): path for path in sorted(found)}


@pytest.fixture(scope='module')
def imports(files):
    """{module: dotted names that it imports}; a name may end in what is not a module."""
    return {module: Imports(path).names for module, path in files.items()}


@pytest.fixture(scope='module')
def arrows(imports):
    targets = {}
    for module, names in imports.items():
        found = {name if name in imports else name.rpartition('.')[0] for name in names}
        targets[module] = (found & imports.keys()) - {module}
    return targets


def test_every_module_has_a_room(files):
    assert {room_of(module) for module in files} - {None} == set(ROOMS)


def test_no_import_runs_upward(arrows):
    level = {room: number for number, room in enumerate(ROOMS)}
    level[None] = -1  # the package itself
    for module, targets in arrows.items():
        for target in targets:
            assert level[room_of(module)] >= level[room_of(target)], f'{module} -> {target}'


def test_imports_have_no_circle(arrows):
    graphlib.TopologicalSorter(arrows).prepare()  # CycleError names one


def test_libraries_stay_in_their_rooms(imports):
    for module, names in imports.items():
        for library, rooms in ONLY.items():
            if any(f'{name}.'.startswith(f'{library}.') for name in names):
                assert room_of(module) in rooms.split(), f'{module} -> {library}'


def test_one_module_knows_what_the_original_called_tensors(files):
    sources = {module: path.read_text(encoding='utf-8') for module, path in files.items()}
    knowing = [module for module, source in sources.items() if ORIGINAL_NAMES.search(source)]
    assert knowing == [f'{PACKAGE}.language.networks.gpt2_files']


def test_rooms_are_small():
    for folder in [REPOSITORY / PACKAGE, *REPOSITORY.glob(f'{PACKAGE}/**/')]:
        assert len(list(folder.glob('*.py'))) <= MOST_FILES, folder


def test_the_core_is_read_in_an_evening():
    """What the original lacked is in other folders than the files of the first table."""
    table = PAGE.partition('| | files in')[2].partition('\n\n')[0].partition('\n')[2]
    core = {f'{name}.py' for name in re.findall(r'`([a-z_/]+)`', table)}
    package = REPOSITORY / PACKAGE
    lines = [len((package / name).read_text('utf-8').splitlines()) for name in core]
    assert len(core) <= 20 and sum(lines) <= 4500
    for folder in ('.', 'language', 'trainers', 'training', 'label_types'):
        files = {str(path.relative_to(package)) for path in (package / folder).glob('*.py')}
        assert files - core <= {'errors.py', str(Path(folder, '__init__.py'))}
