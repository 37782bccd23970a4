"""The structure of the package: no import cycles, no crowded folders, a docstring in every module and package.

Imports are read from the syntax trees, so that imports for annotations only and imports inside functions count.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import networkx
import pytest

MODULES_PER_FOLDER_MAX = 30


@pytest.fixture(scope="module")
def modules(root: Path) -> dict[str, Path]:
    """Dotted name -> file, of every module and package that is not generated."""
    found: dict[str, Path] = {}
    for path in sorted((root / "flowserve").rglob("*.py")):
        if not path.name.endswith("_pb2.py"):
            found[".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


def _imported(path: Path) -> Iterator[str]:
    """The dotted names that a module imports from; `from a import b` gives both `a` and `a.b`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, f"{path} has a relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _imports(modules: dict[str, Path]) -> networkx.DiGraph[str]:
    """Which module imports which. Packages re-export, so an import of a package itself is left out."""
    graph: networkx.DiGraph[str] = networkx.DiGraph()
    for module, path in modules.items():
        for name in _imported(path):
            if name != module and name in modules and modules[name].name != "__init__.py":
                graph.add_edge(module, name)
    return graph


def test_no_modules_import_each_other_in_a_cycle(modules: dict[str, Path]) -> None:
    components = networkx.strongly_connected_components(_imports(modules))
    assert [sorted(component) for component in components if len(component) > 1] == []


def test_no_folder_has_too_many_modules(modules: dict[str, Path], root: Path) -> None:
    counts = Counter(path.parent.relative_to(root).as_posix() for path in modules.values())
    assert {folder: count for folder, count in counts.items() if count > MODULES_PER_FOLDER_MAX} == {}


def test_every_module_and_package_begins_with_a_docstring(modules: dict[str, Path]) -> None:
    assert [name for name, path in modules.items() if ast.get_docstring(ast.parse(path.read_text())) is None] == []


def test_every_folder_of_modules_is_a_package(modules: dict[str, Path]) -> None:
    folders = {path.parent for path in modules.values()}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


HTTPX_CALLS = {"get", "post", "put", "delete", "request", "stream", "options", "head", "patch", "Client", "AsyncClient"}


def _reads_certificates(node: ast.AST) -> bool:
    """httpx reads all certificate authorities for each call that does not say `verify=False` or has no transport."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "httpx"
        and node.func.attr in HTTPX_CALLS
        and not {"verify", "transport", None} & {keyword.arg for keyword in node.keywords}
    )


def test_no_test_reads_certificates_for_plain_http(root: Path) -> None:
    texts = {path: path.read_text() for path in sorted((root / "tests").rglob("*.py"))}
    found = [
        f"{path.relative_to(root)}:{getattr(node, 'lineno', 0)}"
        for path, text in texts.items()
        for node in (ast.walk(ast.parse(text)) if "httpx" in text else ())
        if _reads_certificates(node)
    ]
    assert found == []
