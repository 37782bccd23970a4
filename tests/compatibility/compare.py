"""Compare the two servers on one repository: copies, stand-ins, both servers one after the other, differences.

Decides the order and what a result holds. Everything temporary is in one folder, which is removed at the end.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.compatibility.check import problems_of
from tests.compatibility.comparable import reasons_not_to_compare
from tests.compatibility.differences import Difference, differences
from tests.compatibility.known import row_of
from tests.compatibility.observe import Observed, observe, requests_of
from tests.compatibility.repositories import Repository
from tests.compatibility.servers import DidNotStart, served
from tests.compatibility.stand_ins import Machine, StandIn, make_stand_ins, run_onnx_in_python


@dataclass(slots=True)
class Result:
    """`answered`: requests without an error; `left_out`: models that are not compared, with the reason; `known`: each
    documented difference with its row; `failures`: models that flowserve alone did not serve, and its errors.
    """

    repository: str
    models: list[str] = field(default_factory=list)
    stand_ins: list[StandIn] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    requests: int = 0
    different: list[Difference] = field(default_factory=list)
    known: list[tuple[Difference, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    answered: int = 0
    left_out: dict[str, str] = field(default_factory=dict)


def compare(
    repository: Repository, machine: Machine, *, with_triton: bool, backends_of_triton: Sequence[str] = ("python",)
) -> Result:
    """Serve copies of `repository`, with Triton too if `with_triton`, and compare."""
    result = Result(repository.name)
    with tempfile.TemporaryDirectory(prefix="compare_") as folder:
        copy = Path(folder, "ours", "models")
        repository.copy_to(copy)
        result.stand_ins = make_stand_ins(copy, machine)
        result.problems = problems_of(copy)
        theirs_copy = Path(folder, "theirs", "models")
        shutil.copytree(copy, theirs_copy)
        run_in_python = [] if "onnxruntime" in backends_of_triton else run_onnx_in_python(theirs_copy)
        ours = _observed(copy, by_triton=False)
        result.models = sorted(ours.models)
        result.requests = sum(len(model.answers) for model in ours.models.values())
        result.failures = _failures(ours)
        result.answered = sum(
            answer.is_success for model in ours.models.values() for answer, _ in model.answers.values()
        )
        if with_triton:
            theirs = _observed(theirs_copy, by_triton=True, like=ours)
            result.left_out = reasons_not_to_compare(copy, run_in_python)
            found = differences(ours, theirs, run_in_python, result.left_out)
            _sort(result, [_without_folder(one, folder) for one in found])
    return result


def _observed(repository: Path, *, by_triton: bool, like: Observed | None = None) -> Observed:
    """What the server shows; it gets the same requests as the server before it."""
    try:
        with served(repository, by_triton=by_triton) as addresses:
            asked = None
            if like is not None:
                asked = requests_of(like)
            return observe(addresses, asked)
    except DidNotStart as error:
        return Observed(failure=str(error))


def _failures(ours: Observed) -> list[str]:
    found = [f"server: {text}" for text in (ours.failure, ours.died_at) if text]
    for name, model in ours.models.items():
        if not model.ready:
            found.append(f"{name}: {model.reason}")
        for question, (answer, _) in model.answers.items():
            if not answer.is_success:
                found.append(f"{name}: {question}: {answer.status} {answer.error}")
    return found


def _sort(result: Result, found: Sequence[Difference]) -> None:
    for one in found:
        if row := row_of(one):
            result.known.append((one, row))
        else:
            result.different.append(one)


def _without_folder(one: Difference, folder: str) -> Difference:
    ours, theirs = one.flowserve.replace(folder, ""), one.triton.replace(folder, "")
    return replace(one, flowserve=ours, triton=theirs)
