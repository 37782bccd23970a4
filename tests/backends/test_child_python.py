"""What runs in models' processes runs in older Pythons than the server needs: models may bring theirs along."""

from __future__ import annotations

import ast
import pickle
import sys
from pathlib import Path

import pytest

from flowserve.backends.base import ModelFiles
from flowserve.backends.child.forkserver import PRELOADED
from flowserve.runtime.forkservers import _BEGIN, PYTHON_MIN
from flowserve.values import BY_WIRE

# What the server makes them import besides, first of all or by and by.
LATER = ("flowserve.backends.child.task", "flowserve.backends.child.unpack", "flowserve.backends.child.streaming")
# Names of the standard library that came with 3.11, the server's oldest.
NEWER = {
    *("Self", "Never", "LiteralString", "assert_never", "assert_type", "reveal_type", "Required", "NotRequired"),
    *("Unpack", "TypeVarTuple", "dataclass_transform", "get_overloads", "StrEnum", "ReprEnum", "nonmember"),
    *("chdir", "TaskGroup", "Runner", "Barrier", "UTC", "tomllib", "ExceptionGroup", "BaseExceptionGroup", "add_note"),
    *("file_digest", "getLevelNamesMapping"),
}


@pytest.fixture(scope="module")
def modules(root: Path) -> dict[str, ast.Module]:
    """Ours that may be imported in a model's process, inside of functions too, as they are without types."""
    found: dict[str, ast.Module] = {}
    coming = [*(name for name in PRELOADED if name.startswith("flowserve")), *LATER]
    while coming:
        name = coming.pop()
        file = root.joinpath(*name.split(".")).with_suffix(".py")
        if name in found or not file.is_file():
            continue
        tree = found[name] = _without_types(ast.parse(file.read_text(), feature_version=PYTHON_MIN))
        coming += [one for node in ast.walk(tree) for one in _imported(node) if one.startswith("flowserve.")]
    return found


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [one.name for one in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
    return []


class _WithoutTypes(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        return node.orelse if "TYPE_CHECKING" in ast.dump(node.test) else self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(node.arg)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        return ast.Assign([node.target], node.value or ast.Constant(None), lineno=node.lineno)


def _without_types(tree: ast.Module) -> ast.Module:
    stripped = _WithoutTypes().visit(tree)
    assert isinstance(stripped, ast.Module)
    return stripped


def test_a_models_process_imports_numpy_and_nothing_else_that_is_installed(modules: dict[str, ast.Module]) -> None:
    assert "flowserve.memory.arena" in modules
    imported = {one.partition(".")[0] for tree in modules.values() for node in tree.body for one in _imported(node)}
    assert imported - sys.stdlib_module_names == {"flowserve", "numpy"}


def test_what_it_imports_of_ours_is_written_for_the_oldest_python(modules: dict[str, ast.Module]) -> None:
    for name, tree in modules.items():
        for node in ast.walk(tree):
            used = {one.rpartition(".")[2] for one in _imported(node)}
            used |= {node.id} if isinstance(node, ast.Name) else set()
            used |= {node.attr} if isinstance(node, ast.Attribute) else set()
            assert not used & NEWER, f"{name}, line {getattr(node, 'lineno', 0)}: {used & NEWER}"


def test_whatever_python_it_is_it_can_say_that_it_is_too_old() -> None:
    """Nothing that begins is written in a newer language than the oldest there is a grammar for."""
    ast.parse(_BEGIN, feature_version=(3, 4))
    assert 'f"' not in _BEGIN


def test_what_it_is_told_is_read_by_every_version() -> None:
    """No value of numpy's, and no class that another version keeps elsewhere."""
    told = pickle.dumps([*BY_WIRE.values(), ModelFiles(Path("/models"), Path("/models/m"), 1)], 4)
    assert pickle.loads(told) == [*BY_WIRE.values(), ModelFiles(Path("/models"), Path("/models/m"), 1)]
    assert b"numpy" not in told
    assert b"pathlib" not in told
