"""The code of worker processes runs in older versions of Python than the server, since models may bring their own."""

from __future__ import annotations

import ast
import pickle
import sys
from pathlib import Path

import pytest

from flowserve.backends.base import ModelFiles
from flowserve.backends.worker.forkserver import PRELOADED
from flowserve.runtime.processes.forkservers import _BOOTSTRAP, PYTHON_MIN
from flowserve.values import BY_WIRE

# Modules that the server makes workers import in addition.
LATER = ("flowserve.backends.worker.unpack", "flowserve.backends.worker.streaming")
# Names of the standard library that are new in 3.11, the oldest version of the server.
NEWER = {
    *("Self", "Never", "LiteralString", "assert_never", "assert_type", "reveal_type", "Required", "NotRequired"),
    *("Unpack", "TypeVarTuple", "dataclass_transform", "get_overloads", "StrEnum", "ReprEnum", "nonmember"),
    *("chdir", "TaskGroup", "Runner", "Barrier", "UTC", "tomllib", "ExceptionGroup", "BaseExceptionGroup", "add_note"),
    *("file_digest", "getLevelNamesMapping"),
}


@pytest.fixture(scope="module")
def modules(root: Path) -> dict[str, ast.Module]:
    """The modules of flowserve that a worker may import, also inside functions, without their annotations."""
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


def test_a_worker_process_imports_no_installed_package_but_numpy(modules: dict[str, ast.Module]) -> None:
    assert "flowserve.memory.arena" in modules
    imported = {one.partition(".")[0] for tree in modules.values() for node in tree.body for one in _imported(node)}
    assert imported - sys.stdlib_module_names == {"flowserve", "numpy"}


def test_modules_of_a_worker_are_written_for_the_oldest_python(modules: dict[str, ast.Module]) -> None:
    for name, tree in modules.items():
        for node in ast.walk(tree):
            used = {one.rpartition(".")[2] for one in _imported(node)}
            used |= {node.id} if isinstance(node, ast.Name) else set()
            used |= {node.attr} if isinstance(node, ast.Attribute) else set()
            assert not used & NEWER, f"{name}, line {getattr(node, 'lineno', 0)}: {used & NEWER}"


def test_any_python_can_report_that_it_is_too_old() -> None:
    """The start of a worker is valid in the oldest Python grammar that `ast` can check."""
    ast.parse(_BOOTSTRAP, feature_version=(3, 4))
    assert 'f"' not in _BOOTSTRAP


def test_messages_to_a_worker_are_readable_by_every_version() -> None:
    """No numpy values, and no classes whose module differs between versions."""
    told = pickle.dumps([*BY_WIRE.values(), ModelFiles(Path("/models"), Path("/models/m"), 1)], 4)
    assert pickle.loads(told) == [*BY_WIRE.values(), ModelFiles(Path("/models"), Path("/models/m"), 1)]
    assert b"numpy" not in told
    assert b"pathlib" not in told
