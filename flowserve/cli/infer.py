"""`flowserve infer`: one request to a server, and its answer.

Decided here: how an answer is shown: for people as arrays, with `--json` as one line of JSON for programs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from flowserve.cli.client import Address, ask, metadata
from flowserve.cli.tensors import dtype_of, infer_body, plain, read_answer, read_inputs, write_output
from flowserve.errors import FlowserveError


@dataclass(frozen=True, slots=True)
class InferOptions:
    """`inputs` are "NAME=VALUE", `outputs` "NAME" or "NAME=FILE"."""

    url: str
    model: str
    version: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    as_json: bool


def infer(options: InferOptions, out: TextIO, err: TextIO) -> int:
    """Ask and print. Returns the exit status: 0, or 1 with a sentence on `err`."""
    try:
        _infer(options, out)
    except FlowserveError as error:
        print(f"flowserve: {error}", file=err)
        return 1
    return 0


def _infer(options: InferOptions, out: TextIO) -> None:
    address = Address.of(options.url)
    inputs = read_inputs(options.inputs, metadata(address, options.model, options.version))
    files = {name: Path(file) for name, equals, file in (word.partition("=") for word in options.outputs) if equals}
    body, headers = infer_body(inputs, [word.partition("=")[0] for word in options.outputs])
    header, arrays = read_answer(
        *ask(address, "POST", address.path(options.model, options.version, "/infer"), body, headers)
    )
    for name, path in files.items():
        write_output(arrays[name], path)
    shown = {name: array for name, array in arrays.items() if name not in files}
    if options.as_json:
        outputs = [
            {"name": name, "datatype": dtype_of(array).wire, "shape": [*array.shape], "data": plain(array)}
            for name, array in shown.items()
        ]
        print(json.dumps({**header, "outputs": outputs}), file=out)
        return
    for name, array in shown.items():
        print(f"{name}  {dtype_of(array)} {json.dumps([*array.shape])}\n{array}", file=out)
    for name, path in files.items():
        print(f"{name}  written to {path}", file=out)
