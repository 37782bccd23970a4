"""Fixtures: model folders on disk from the text of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flowserve.config.load import Draft, find_problems, read_draft
from flowserve.config.rules import RuleInput
from flowserve.config.types import NO_GPUS, Gpus
from flowserve.errors import Problem

DEFAULT_FILES = {
    "onnxruntime": "model.onnx",
    "tensorrt": "model.plan",
    "python": "model.py",
    "pytorch": "model.pt",
    "tensorflow": "model.savedmodel",
}


@pytest.fixture
def draft(tmp_path: Path) -> Callable[..., Draft]:
    """`draft(text, "1/model.py")` reads a folder "m" with that config.pbtxt (none for None) and those empty files."""

    def read(text: str | None, *files: str, name: str = "m") -> Draft:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        if text is not None:
            (folder / "config.pbtxt").write_text(text, encoding="utf-8")
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(b"")
        return read_draft(folder, tmp_path, DEFAULT_FILES)

    return read


@pytest.fixture
def judge(draft: Callable[..., Draft]) -> Callable[..., list[Problem]]:
    """`judge(text)`: the problems of a configuration by the numbered rules, without unsupported features."""

    def problems(
        text: str | None, *files: str, name: str = "m", gpus: Gpus = NO_GPUS, **machine: bool
    ) -> list[Problem]:
        read = draft(text, *files, name=name)
        return find_problems(RuleInput(read.parsed.message, read.parsed.source, read.folder, gpus, **machine))

    return problems
