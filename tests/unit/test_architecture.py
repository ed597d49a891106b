"""Rooms of the package (docs/architecture.md): imports between them and of libraries."""

import ast
import functools
import graphlib
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = 'lm_human_preferences'
MOST_FILES = 13  # in one folder
# Lowest first. A module may import from its own room and from those above it in this list.
ROOMS = (
    'errors',
    'storage',
    'utils',
    'machine',
    'distributed',
    'checkpointing',
    'datasets',
    'label_types',
    'hparams',
    'runs',
    'training',
    'language',
    'ppo',
    'policy',
    'synthetic',
    'external_rewards',
    'lm_tasks',
    'labels',
    'frozen_head',
    'rewards',
    'reward_sources',
    'evaluation',
    'plan',
    'session',
    'trainers',
    'train_reward',
    'tracked_samples',
    'online',
    'train_policy',
    'report',
    'commands',
    'cli',
    'launch',  # the two scripts
    'sample',
)
# The rooms that may import a library or a module of ours. `horovod` includes `horovod.torch`.
ONLY = {
    'mpi4py': 'distributed',
    'horovod': 'distributed',
    'torch.distributed': 'distributed',
    'blobfile': 'storage',
    'huggingface_hub': 'storage report',  # in the latter for model cards
    'starlette': 'labels',
    'uvicorn': 'labels',
    # Other rooms know what every network can do: language/network.py.
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
    if name in ROOMS:
        return name
    return name.partition('.')[0] or None


class Imports(ast.NodeVisitor):
    """Collects imported dotted names; `torch.distributed` also as an attribute of torch."""

    def __init__(self, module, is_package):
        parents = module.split('.')
        self.package = parents if is_package else parents[:-1]
        self.names = set()

    def visit_Import(self, node):
        self.names.update(alias.name for alias in node.names)

    def visit_ImportFrom(self, node):
        origin = node.module or ''
        if node.level:
            base = self.package[: len(self.package) - node.level + 1]
            origin = '.'.join([*base, *filter(None, [node.module])])
        self.names.update(f'{origin}.{alias.name}' for alias in node.names)

    def visit_Attribute(self, node):
        name = ast.unparse(node)
        if name in ONLY:
            self.names.add(name)
        self.generic_visit(node)


def imports_of(files):
    """{module: dotted names that it imports}; a name may end in what is not a module."""
    return {
        module: _names_imported(module, path.name == '__init__.py', path.read_text('utf-8'))
        for module, path in files.items()
    }


@functools.cache
def _names_imported(module, is_package, source):
    visitor = Imports(module, is_package)
    visitor.visit(ast.parse(source))
    return visitor.names


def arrows(files):
    targets = {}
    for module, names in imports_of(files).items():
        targets[module] = set()
        for name in names:
            target = name if name in files else name.rpartition('.')[0]
            if target in files and target != module:
                targets[module].add(target)
    return targets


@pytest.fixture(scope='module')
def files():
    found = [*REPOSITORY.glob('*.py'), *REPOSITORY.glob(f'{PACKAGE}/**/*.py')]
    return {module_name(path): path for path in sorted(found)}


def test_every_module_has_a_room(files):
    assert {room_of(module) for module in files} - {None} == set(ROOMS)


def test_no_import_runs_upward(files):
    level = {room: number for number, room in enumerate(ROOMS)}
    level[None] = -1  # the package itself
    for module, targets in arrows(files).items():
        for target in targets:
            assert level[room_of(module)] >= level[room_of(target)], f'{module} -> {target}'


def test_imports_have_no_circle(files):
    graphlib.TopologicalSorter(arrows(files)).prepare()  # CycleError names one


def test_libraries_stay_in_their_rooms(files):
    for module, names in imports_of(files).items():
        for library, rooms in ONLY.items():
            if any(f'{name}.'.startswith(f'{library}.') for name in names):
                assert room_of(module) in rooms.split(), f'{module} -> {library}'


def test_one_module_knows_what_the_original_called_tensors(files):
    sources = {module: path.read_text(encoding='utf-8') for module, path in files.items()}
    knowing = [module for module, source in sources.items() if ORIGINAL_NAMES.search(source)]
    assert knowing == [f'{PACKAGE}.language.gpt2.tf_names']


def test_rooms_are_small():
    for folder in [REPOSITORY / PACKAGE, *REPOSITORY.glob(f'{PACKAGE}/**/')]:
        assert len(list(folder.glob('*.py'))) <= MOST_FILES, folder


def test_the_drawing_has_the_rooms_in_their_order():
    page = (REPOSITORY / 'docs/architecture.md').read_text(encoding='utf-8')
    drawing = page.partition('## The rooms')[2].partition('What each room')[0]
    drawn = re.findall(r'^    ([a-z_]+)/?  ', drawing, re.MULTILINE)
    assert drawn == [room for room in reversed(ROOMS) if room not in ('launch', 'sample')]
