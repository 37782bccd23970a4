"""`flowserve new`: writes a repository with a small, commented graph as a starting point.

Decides its contents: two Python models and the ensemble that joins them, a test, and a README with the next commands.
The files are in `template/`, where "{name}" in paths and texts stands for the graph's name; they are not checked when
written.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Final

from flowserve.errors import Invalid
from flowserve.repository.layout import KEEP

NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,60}")

TEMPLATE: Final = Path(__file__).with_name("template")
CODE: Final = ".txt"  # the suffix of files with Python code: without it, tools would take them for flowserve's own


def execute(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Write the repository into a new folder. Raises Invalid."""
    path: Path = arguments.folder
    name = path.name
    if not NAME.fullmatch(name):
        text = f"{name!r} cannot be the graph's name: small letters, digits and _, a letter first"
        close = re.sub(r"\W+", "_", name.lower()).strip("_")
        raise Invalid(f"{text}, for example {close}" if NAME.fullmatch(close) else text)
    try:
        path.mkdir(parents=True)
        for file in TEMPLATE.rglob("*.*"):
            target = path / str(file.relative_to(TEMPLATE)).removesuffix(CODE).replace("{name}", name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(file.read_text("utf-8").replace("{name}", name), encoding="utf-8")
        (path / name / "1").mkdir()
        (path / name / "1" / KEEP).touch()
    except FileExistsError:
        raise Invalid(f"{path} exists already; nothing was written") from None
    except OSError as error:
        raise Invalid(f"{path} cannot be written: {error.strerror}") from None
    if not arguments.quiet:
        print(f"{path} is a repository of a graph called {name}; next: flowserve run {path}")
    return 0
