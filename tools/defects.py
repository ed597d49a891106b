"""Single-line defects that a tired engineer could make in the package, for tools/mutate.py."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import itertools
import random
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = 'lm_human_preferences'
OPERATORS = {
    ast.Lt: ('<', ('<=', '>')),
    ast.LtE: ('<=', ('<', '>=')),
    ast.Gt: ('>', ('>=', '<')),
    ast.GtE: ('>=', ('>', '<=')),
    ast.Eq: ('==', ('!=',)),
    ast.NotEq: ('!=', ('==',)),
    ast.Is: ('is', ('is not',)),
    ast.IsNot: ('is not', ('is',)),
    ast.In: ('in', ('not in',)),
    ast.NotIn: ('not in', ('in',)),
    ast.Add: ('+', ('-',)),
    ast.Sub: ('-', ('+',)),
    ast.And: ('and', ('or',)),
    ast.Or: ('or', ('and',)),
}
# Functions whose arguments are messages or types.
TELLING = {'TypeVar', 'cast', 'echo', 'fail', 'note', 'print', 'warn', 'write_summary'}
SYMMETRIC = {'max', 'maximum', 'min', 'minimum'}  # functions whose arguments may stand in any order


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A defect. path: from the root of the repository. before, after: the whole line."""

    path: str
    line: int
    kind: str
    before: str
    after: str

    def change(self) -> str:
        """Return the file and the change, without the number of the line."""
        return f'{self.path}: {self.before.strip()} -> {self.after.strip() or "(nothing)"}'

    def __str__(self) -> str:
        return self.change().replace(': ', f':{self.line}: ', 1)

    def applied_to(self, text: str) -> str:
        """The file with the defect."""
        lines = text.split('\n')
        lines[self.line - 1] = self.after
        return '\n'.join(lines)


class Finder(ast.NodeVisitor):
    """Finds the defects that one file could have. Columns are those of ast, in bytes."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.lines = text.split('\n')
        self.found: list[Mutant] = []

    def add(self, kind: str, line: int, begin: int, end: int, new: bytes) -> None:
        """Note that `new` could stand in a part of a line."""
        before = self.lines[line - 1]
        head, tail = before.encode()[:begin], before.encode()[end:]
        if kind == 'left out' and tail.startswith(b','):
            tail = tail.lstrip(b', ')
        elif kind == 'left out':
            head = head.rstrip(b', ')
        after = (head + new + tail).decode()
        self.found.append(Mutant(self.path, line, kind, before, after))

    def replace(self, kind: str, node: ast.expr | ast.stmt | ast.keyword, new: bytes) -> None:
        """Note that `new` could stand in place of a node that is on one line."""
        if node.lineno == node.end_lineno:
            self.add(kind, node.lineno, node.col_offset, node.end_col_offset or 0, new)

    def source(self, node: ast.expr) -> bytes:
        """The text of a node that is on one line."""
        return self.lines[node.lineno - 1].encode()[node.col_offset : node.end_col_offset]

    def turn(self, kind: str, left: ast.expr, operator: ast.AST, right: ast.expr) -> None:
        """Note what else could stand between two operands on one line."""
        if left.end_lineno != right.lineno or type(operator) not in OPERATORS:
            return
        old, others = OPERATORS[type(operator)]
        begin, end = left.end_col_offset or 0, right.col_offset
        between = self.lines[right.lineno - 1].encode()[begin:end]
        for new in others:
            self.add(kind, right.lineno, begin, end, between.replace(old.encode(), new.encode()))

    def negate(self, test: ast.expr) -> None:
        """Note that a condition could be negated."""
        self.replace('negated', test, b'not (' + self.source(test) + b')')

    def visit_Compare(self, node: ast.Compare) -> None:
        self.turn('comparison', node.left, node.ops[0], node.comparators[0])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not is_text(node.left) and not is_text(node.right):
            self.turn('sign', node.left, node.op, node.right)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:]):
            self.turn('and, or', left, node.op, right)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            others: list[float] = [not value]
        elif isinstance(value, int):
            others = [value + 1, value - 1]
        elif isinstance(value, float):
            others = [value * 2, value / 2] if value else [1.0]
        else:
            return
        for new in others:
            self.replace('constant', node, repr(new).encode())

    def visit_Call(self, node: ast.Call) -> None:
        if is_telling(node):
            return
        if name_of(node) not in SYMMETRIC:
            self.swap(node.args)
        for part in [node.func, *node.args]:
            self.visit(part)
        for keyword in node.keywords:
            if keyword.arg == 'strict':  # an assertion: that zip gets equally many
                continue
            if not is_text(keyword.value):
                self.replace('left out', keyword, b'')
            self.visit(keyword.value)

    def swap(self, arguments: list[ast.expr]) -> None:
        """Note that neighbours on one line could be swapped."""
        for first, second in itertools.pairwise(arguments):
            is_one_line = first.lineno == second.end_lineno
            if is_one_line and not is_text(first) and not is_text(second):
                between = (first.end_col_offset or 0, second.col_offset)
                middle = self.lines[first.lineno - 1].encode()[slice(*between)]
                swapped = self.source(second) + middle + self.source(first)
                end = second.end_col_offset or 0
                self.add('swapped', first.lineno, first.col_offset, end, swapped)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and not is_telling(node.value):
            self.replace('dropped', node, b'pass')
        self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.IfExp | ast.While) -> None:
        if 'TYPE_CHECKING' not in ast.unparse(node.test):
            self.negate(node.test)
            self.generic_visit(node)

    visit_IfExp = visit_While = visit_If

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self.negate(test)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self.visit(default)
        for statement in node.body:
            self.visit(statement)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def skip(self, node: ast.AST) -> None:
        """Look at nothing in it: messages, and what is not there when it matters."""

    visit_Raise = visit_Assert = visit_JoinedStr = skip


def is_text(node: ast.expr) -> bool:
    """Return whether a node is a text of the program."""
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, 'value', None), str | bytes)


def is_telling(call: ast.Call) -> bool:
    """Return whether a call's arguments are messages or types."""
    name = name_of(call)
    return name in TELLING or name.endswith('Error')


def name_of(call: ast.Call) -> str:
    """Return the name of the function or method that is called; '' without one."""
    return getattr(call.func, 'attr', getattr(call.func, 'id', ''))


def draw(seed: int, count: int) -> list[Mutant]:
    """Draw from every room once, then more from the large ones; of all kinds alike."""
    chance = random.Random(seed)
    rooms: dict[str, list[Mutant]] = {}
    texts = {}
    for path in sorted((ROOT / PACKAGE).rglob('*.py')):
        name = path.relative_to(ROOT).as_posix()
        texts[name] = path.read_text(encoding='utf-8')
        finder = Finder(name, texts[name])
        finder.visit(ast.parse(texts[name]))
        rooms.setdefault(name.split('/')[1], []).extend(finder.found)
    names = [name for name, mutants in rooms.items() if mutants]
    sizes = [len(rooms[name]) ** 0.5 for name in names]
    asked = chance.sample(names, len(names))
    drawn: list[Mutant] = []
    while len(drawn) < count and any(rooms.values()):
        name = asked[-1] if asked else chance.choices(names, sizes)[0]
        if not rooms[name]:
            continue
        kind = chance.choice(sorted({mutant.kind for mutant in rooms[name]}))
        mutant = chance.choice([mutant for mutant in rooms[name] if mutant.kind == kind])
        rooms[name].remove(mutant)
        if not is_python(mutant.applied_to(texts[mutant.path])):
            continue
        drawn.append(mutant)
        place = (mutant.path, mutant.line)
        rooms[name] = [other for other in rooms[name] if (other.path, other.line) != place]
        if asked:
            asked.pop()
    return drawn


def is_python(text: str) -> bool:
    """Return whether a file can be loaded at all."""
    with contextlib.suppress(SyntaxError):
        ast.parse(text)
        return True
    return False
