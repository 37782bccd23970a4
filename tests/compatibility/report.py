"""Print the results as a table, and write them as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.compatibility.compare import Result
from tests.compatibility.differences import NORMALISED, Difference
from tests.compatibility.requests import Protocol

SAME_TEXT = 40  # characters: what follows in texts may be numbers of rows
SCHEMA = "flowserve.compatibility/1"


def print_result(result: Result, *, with_triton: bool, verbose: bool) -> None:
    """One line for a repository, and one for each difference, or, without Triton, for each failure."""
    asked = f"{len(result.models):>3} models, {result.answered:>3} of {result.requests:<3} requests answered"
    print(f"{result.repository:<40} {asked}  {_state(result, with_triton)}", flush=True)
    for name, reason in result.left_out.items():
        print(f"    {name}: not compared: {reason}")
    for one, count in _grouped(result.different):
        print(f"    {one}{f' ({count} requests)' if count > 1 else ''}")
    if not with_triton:
        for failure in result.failures:
            print(f"    {' '.join(failure.split())[:300]}")
    if verbose:
        for stand_in in result.stand_ins:
            print(f"    stand-in: {stand_in.model}: {stand_in.what} ({stand_in.why})")
        for problem in result.problems:
            print(f"    check: {problem}")
        for difference, row in result.known:
            print(f"    documented: {difference} [{row}]")


def print_total(results: Sequence[Result], *, with_triton: bool) -> None:
    models, requests = sum(len(one.models) for one in results), sum(one.requests for one in results)
    print(f"{len(results)} repositories, {models} models, {requests} requests: ", end="")
    if with_triton:
        known = sum(len(one.known) for one in results)
        print(f"{sum(len(one.different) for one in results)} differences, {known} that are documented")
    else:
        print(f"{sum(len(one.failures) for one in results)} failures")


def write_json(path: Path, results: Sequence[Result]) -> None:
    told = {"schema": SCHEMA, "normalised": NORMALISED, "repositories": [asdict(one) for one in results]}
    path.write_text(json.dumps(told, indent=1) + "\n")


def _grouped(found: Sequence[Difference]) -> list[tuple[Difference, int]]:
    """The first of those that differ in the protocol and the number of rows only, and how many there are."""
    groups: dict[tuple[str, ...], list[Difference]] = {}
    for one in found:
        request, _, part = one.subject.partition(":")
        is_request = any(request.startswith(protocol.value) for protocol in Protocol)
        shown = one.flowserve[:SAME_TEXT], one.triton[:SAME_TEXT]
        groups.setdefault((one.model, part if is_request else one.subject, *shown), []).append(one)
    return [(group[0], len(group)) for group in groups.values()]


def _state(result: Result, with_triton: bool) -> str:
    if not with_triton:
        return f"{len(result.failures)} failures" if result.failures else "served"
    documented = f", {len(result.known)} documented" if result.known else ""
    return (f"{len(result.different)} differences" if result.different else "equal") + documented
