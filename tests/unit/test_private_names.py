"""Private names of libraries: in few functions, each with a test that notices their absence."""

import ast

from launched import REPOSITORY

PACKAGE = REPOSITORY / 'lm_human_preferences'
# {function: what it uses}
KNOWN = {
    'language.causal_lm.activation_memory._storage_of': {'_cdata'},
    'language.causal_lm.activation_memory._traced': {'_subclasses'},
    'storage.blobs._has_credentials': {'_azure', '_load_credentials'},
    'storage.blobs._use_anonymous_access': {'_azure', '_tokens', '_expirations'},
    'training.precision._version_of': {'_version'},
    'training.precision._prepack_operator': {
        '_reorder_linear_weight',
        '_linear_pointwise',
        '_is_mkldnn_bf16_supported',
    },
    'training.precision._prepacked_product': {'_linear_pointwise'},
}
DOCUMENTED = {'_exit', '_replace'}  # of os, and of named tuples


def is_private(name):
    return name.startswith('_') and not name.startswith('__') and name not in DOCUMENTED


class PrivateNames(ast.NodeVisitor):
    def __init__(self, tree):
        self.scope = []
        self.found = {}
        self.own = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.own.add(node.name)
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                self.own.add(node.id if isinstance(node, ast.Name) else node.attr)
        self.visit(tree)

    def add(self, *names):
        for name in filter(is_private, names):
            self.found.setdefault('.'.join(self.scope), set()).add(name)

    def visit_FunctionDef(self, node):
        self.scope.append(node.name)
        self.generic_visit(node)
        self.scope.pop()

    visit_ClassDef = visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Import(self, node):
        for alias in node.names:
            self.add(*alias.name.split('.'))

    def visit_ImportFrom(self, node):
        self.add(*(node.module or '').split('.'), *(alias.name for alias in node.names))

    def visit_Attribute(self, node):
        is_own_object = isinstance(node.value, ast.Name) and node.value.id in ('self', 'cls')
        if not (is_own_object and node.attr in self.own):
            self.add(node.attr)
        self.generic_visit(node)


def test_each_private_name_is_behind_one_function():
    found = {}
    for path in PACKAGE.rglob('*.py'):
        module = '.'.join(path.relative_to(PACKAGE).with_suffix('').parts)
        tree = ast.parse(path.read_text(encoding='utf-8'))
        for scope, names in PrivateNames(tree).found.items():
            found[f'{module}.{scope}'] = names
    assert found == KNOWN
