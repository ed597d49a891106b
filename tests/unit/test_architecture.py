"""The rooms of the package: what may import what, and which room alone knows which library.

docs/architecture.md draws the rooms. Each rule is also tested on a made-up package that breaks it.
"""

import ast
import functools
import re
import textwrap
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
    'distributed',
    'checkpointing',
    'datasets',
    'hparams',
    'runs',
    'training',
    'language',
    'policy',
    'synthetic',
    'label_types',
    'lm_tasks',
    'labels',
    'rewards',
    'ppo',
    'evaluation',
    'plans',
    'session',
    'train_reward',
    'online',
    'train_policy',
    'reproduction',
    'commands',
    'utils.launch',
    'utils.label_commands',
    'launch',  # the two scripts
    'sample',
)
# The one room that may import a library or a module of ours. `horovod` includes `horovod.torch`.
ONLY = {
    'mpi4py': 'distributed',
    'horovod': 'distributed',
    'torch.distributed': 'distributed',
    'blobfile': 'storage',
    'starlette': 'labels',
    'uvicorn': 'labels',
    f'{PACKAGE}.checkpointing.tf_table': 'checkpointing',
}
# Faults that are still there: {line that is found: why}. None may be added.
STANDING: dict[str, str] = {}


def module_name(path, root):
    """lm_human_preferences.runs.run_dir for its file; lm_human_preferences.runs for __init__.py."""
    parts = path.relative_to(root).with_suffix('').parts
    return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


def source_files(root):
    """{name of a module: its file}, of the package and the scripts beside it."""
    files = [*root.glob('*.py'), *root.glob(f'{PACKAGE}/**/*.py')]
    return {module_name(path, root): path for path in sorted(files)}


def room_of(module):
    """The entry of ROOMS that a module belongs to; None for the package itself, which is empty."""
    name = module.removeprefix(PACKAGE).lstrip('.')
    if name in ROOMS:
        return name
    return name.partition('.')[0] or None


def is_below(name, parent):
    """Whether a dotted name is `parent` or something in it."""
    return f'{name}.'.startswith(f'{parent}.')


class Imports(ast.NodeVisitor):
    """Collects the dotted names that a module imports, in functions too, but not for types alone.

    `torch.distributed` counts as imported where it is used as an attribute of torch.
    """

    def __init__(self, module, is_package):
        parents = module.split('.')
        self.package = parents if is_package else parents[:-1]
        self.names = set()

    def visit_If(self, node):
        if 'TYPE_CHECKING' in ast.unparse(node.test):
            for statement in node.orelse:
                self.visit(statement)
        else:
            self.generic_visit(node)

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
    """{module: dotted names that it imports}; a name may end in what is no module."""
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
    """{module: modules of ours that it imports}."""
    targets = {}
    for module, names in imports_of(files).items():
        targets[module] = set()
        for name in names:
            target = name if name in files else name.rpartition('.')[0]
            if target in files and target != module:
                targets[module].add(target)
    return targets


def strangers(files):
    """Modules that belong to no room."""
    return [m for m in files if room_of(m) not in {None, *ROOMS}]


def upward(files):
    """Imports of a room by a lower one, as 'importer -> imported'."""
    level = {room: number for number, room in enumerate(ROOMS)}
    level[None] = -1  # the package itself
    return [
        f'{module} -> {target}'
        for module, targets in arrows(files).items()
        for target in sorted(targets)
        if level[room_of(module)] < level[room_of(target)]
    ]


def circles(files):
    """Shortest ways from a module back to itself, as 'a -> b -> a': one for each module."""
    graph = arrows(files)
    found = []
    for start in graph:
        paths = [[start]]
        seen = set()
        while paths:
            path = paths.pop(0)  # shortest first
            targets = graph[path[-1]]
            if start in targets:
                found.append(' -> '.join([*path, start]))
                break
            paths += [[*path, target] for target in sorted(targets - seen)]
            seen |= targets
    return found


def trespassers(files):
    """Imports that ONLY allows to another room, as 'importer -> imported'."""
    return [
        f'{module} -> {name}'
        for module, names in imports_of(files).items()
        for name in sorted(names)
        for library, room in ONLY.items()
        if is_below(name, library) and room_of(module) != room
    ]


def crowded(root):
    """Folders of the package with too many files, each with its number."""
    folders = [path for path in [root / PACKAGE, *root.glob(f'{PACKAGE}/**/')] if path.is_dir()]
    counts = {
        folder.relative_to(root).as_posix(): len(list(folder.glob('*.py'))) for folder in folders
    }
    return {folder: count for folder, count in counts.items() if count > MOST_FILES}


def undescribed(files):
    """Packages whose __init__.py does not say what they know."""
    packages = {m: path for m, path in files.items() if path.name == '__init__.py'}
    return [
        module
        for module, path in packages.items()
        if not ast.get_docstring(ast.parse(path.read_text(encoding='utf-8')))
    ]


# ---------------------------------------------------------------- the package as it is


@pytest.fixture(scope='module')
def files():
    return source_files(REPOSITORY)


def without_standing(found):
    return [line for line in found if line not in STANDING]


def test_every_module_has_a_room(files):
    assert strangers(files) == []
    rooms = {room_of(module) for module in files} - {None}
    assert rooms == set(ROOMS)


def test_no_import_runs_upward(files):
    assert without_standing(upward(files)) == []


def test_imports_have_no_circle(files):
    assert without_standing(circles(files)) == []


def test_libraries_stay_in_their_rooms(files):
    assert without_standing(trespassers(files)) == []


def test_every_library_that_is_confined_is_used(files):
    """Else a rule about it would be kept by mistake."""
    names = set().union(*imports_of(files).values())
    for library in ONLY:
        assert any(is_below(name, library) for name in names), library


def test_standing_faults_are_still_there(files):
    """A fault that has been mended leaves the list."""
    found = {*upward(files), *circles(files), *trespassers(files)}
    assert set(STANDING) - found == set()


def test_rooms_are_small():
    assert crowded(REPOSITORY) == {}


def test_rooms_say_what_they_know(files):
    assert undescribed(files) == []


def test_the_drawing_has_the_rooms_in_their_order():
    page = (REPOSITORY / 'docs/architecture.md').read_text(encoding='utf-8')
    drawing = page.partition('## The rooms')[2].partition('What each room')[0]
    drawn = re.findall(r'^    ([a-z_]+(?:/launch|/label_commands|/)?)  ', drawing, re.MULTILINE)
    rooms = [room.rstrip('/').replace('/', '.') for room in drawn]
    assert rooms == [room for room in reversed(ROOMS) if room not in ('launch', 'sample')]


# ---------------------------------------------------------------- each rule finds its fault


@pytest.fixture
def make(tmp_path):
    """Function that writes a package, {path below it: source}, and returns its files."""

    def write(**sources):
        for name in ('', *{path.partition('__')[0] for path in sources if '__' in path}):
            folder = tmp_path / PACKAGE / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / '__init__.py').write_text('"""What it knows."""\n')
        for path, source in sources.items():
            file = tmp_path / PACKAGE / f'{path.replace("__", "/")}.py'
            file.write_text(textwrap.dedent(source))
        return source_files(tmp_path)

    return write


IMPORTS = [
    f'from {PACKAGE} import rewards',
    f'from {PACKAGE}.rewards import RewardModel',
    f'import {PACKAGE}.rewards',
    f'import {PACKAGE}.rewards as models',
    'from .. import rewards',
    'from ..rewards import RewardModel',
    f'def late():\n    from {PACKAGE} import rewards',
    f'try:\n    from {PACKAGE} import rewards\nexcept ImportError:\n    pass',
    f'if TYPE_CHECKING:\n    pass\nelse:\n    from {PACKAGE} import rewards',
]


@pytest.mark.parametrize('source', IMPORTS)
def test_an_import_upward_is_found(make, source):
    files = make(storage__files=source, rewards='')
    assert upward(files) == [f'{PACKAGE}.storage.files -> {PACKAGE}.rewards']


def test_an_import_downward_is_allowed(make):
    files = make(storage__files='', rewards=f'from {PACKAGE}.storage import files')
    assert upward(files) == []
    assert arrows(files)[f'{PACKAGE}.rewards'] == {f'{PACKAGE}.storage.files'}


@pytest.mark.parametrize('test', ['TYPE_CHECKING', 'typing.TYPE_CHECKING'])
def test_an_import_for_types_alone_is_allowed(make, test):
    files = make(storage__files=f'if {test}:\n    from {PACKAGE} import rewards', rewards='')
    assert upward(files) == []


def test_utils_launch_is_above_the_other_utils(make):
    files = make(
        utils__core=f'from {PACKAGE}.utils import launch',
        utils__launch=f'from {PACKAGE} import train_policy',
        train_policy='',
    )
    assert upward(files) == [f'{PACKAGE}.utils.core -> {PACKAGE}.utils.launch']


def test_a_circle_is_found(make):
    files = make(
        storage__a=f'from {PACKAGE}.storage import b',
        storage__b=f'def late():\n    from {PACKAGE}.storage.c import name',
        storage__c=f'from {PACKAGE}.storage import a',
        storage__d=f'from {PACKAGE}.storage import a',
    )
    a, b, c = (f'{PACKAGE}.storage.{name}' for name in 'abc')
    assert circles(files) == [
        f'{a} -> {b} -> {c} -> {a}',
        f'{b} -> {c} -> {a} -> {b}',
        f'{c} -> {a} -> {b} -> {c}',
    ]
    assert upward(files) == []


@pytest.mark.parametrize(
    'source, found',
    [
        ('from mpi4py import MPI', 'mpi4py.MPI'),
        ('def late():\n    import horovod.torch as hvd', 'horovod.torch'),
        ('import torch.distributed', 'torch.distributed'),
        ('from torch import distributed', 'torch.distributed'),
        ('import torch\n\ntorch.distributed.init_process_group()', 'torch.distributed'),
        ('import blobfile as bf', 'blobfile'),
        (
            f'from {PACKAGE}.checkpointing.tf_table import Table',
            f'{PACKAGE}.checkpointing.tf_table.Table',
        ),
    ],
)
def test_a_library_outside_its_room_is_found(make, source, found):
    assert trespassers(make(training__x=source)) == [f'{PACKAGE}.training.x -> {found}']
    (library,) = (name for name in ONLY if is_below(found, name))
    files = make(training__x='', **{f'{ONLY[library]}__x': source})
    assert trespassers(files) == []


def test_other_libraries_are_free(make):
    assert trespassers(make(training__x='import torch.distributions, mpi4python, torch.nn')) == []


def test_a_module_without_a_room_is_found(make):
    files = make(attic__x='', cellar='')
    assert strangers(files) == [f'{PACKAGE}.attic', f'{PACKAGE}.attic.x', f'{PACKAGE}.cellar']


def test_a_crowded_room_is_found(make, tmp_path):
    make(**{f'storage__m{i}': '' for i in range(MOST_FILES - 1)})
    assert crowded(tmp_path) == {}
    make(storage__another='')
    assert crowded(tmp_path) == {f'{PACKAGE}/storage': MOST_FILES + 1}


def test_a_room_without_a_docstring_is_found(make, tmp_path):
    (make(storage__x='')[f'{PACKAGE}.storage']).write_text('# not a docstring\n')
    assert undescribed(source_files(tmp_path)) == [f'{PACKAGE}.storage']
