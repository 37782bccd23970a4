"""`flowserve infer`: sends one request to a server and prints its response, or each response of a decoupled model.

Decides the output: arrays as text, or one line of JSON per response with `--json`; each response on arrival.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from flowserve.cli.client import Address, ask, describe, events
from flowserve.cli.inputs import read_inputs
from flowserve.cli.tensors import (
    InferBody,
    Parameters,
    dtype_of,
    flat_body,
    plain,
    read_answer,
    read_flat_answer,
    write_output,
)
from flowserve.errors import Invalid
from flowserve.values import Array


@dataclass(frozen=True, slots=True)
class InferOptions:
    """`inputs` are "NAME=VALUE", `outputs` "NAME" or "NAME=FILE", `parameters` those of the request."""

    url: str
    model: str
    version: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    as_json: bool
    parameters: Parameters


def infer(options: InferOptions, out: TextIO) -> None:
    """Send the request and print to `out`. Raises FlowserveError."""
    address = Address.of(options.url)
    described, is_decoupled = describe(address, options.model, options.version)
    inputs = read_inputs(options.inputs, described)
    if is_decoupled:
        _stream(options, address, described, inputs, out)
        return
    files = {name: Path(file) for name, equals, file in (word.partition("=") for word in options.outputs) if equals}
    body, headers = InferBody(inputs, [word.partition("=")[0] for word in options.outputs]).of(options.parameters)
    header, arrays = read_answer(
        *ask(address, "POST", address.path(options.model, options.version, "/infer"), body, headers)
    )
    for name, path in files.items():
        write_output(arrays[name], path)
    _show(header, {name: array for name, array in arrays.items() if name not in files}, options, out)
    for name, path in files.items() if not options.as_json else ():
        print(f"{name}  written to {path}", file=out)


def _stream(
    options: InferOptions, address: Address, described: Mapping[str, Any], inputs: Mapping[str, Array], out: TextIO
) -> None:
    """Print every response on arrival. Over HTTP, streamed responses are plain JSON."""
    known = {tensor["name"]: tensor for tensor in described["outputs"]}
    for word in options.outputs:
        if "=" in word:
            raise Invalid(f"--output {word}: '{options.model}' answers any number of times; only names are taken here")
        if word not in known:
            raise Invalid(f"--output {word}: the model has no such output; it has {', '.join(known)}")
    shown = {name: known[name] for name in options.outputs or known}
    path = address.path(options.model, options.version, "/generate_stream")
    for event in events(address, path, flat_body(inputs, described, options.parameters)):
        _show(*read_flat_answer(event, shown), options, out)
        out.flush()


def _show(header: Mapping[str, Any], arrays: Mapping[str, Array], options: InferOptions, out: TextIO) -> None:
    if options.as_json:
        outputs = [
            {"name": name, "datatype": dtype_of(array).wire, "shape": [*array.shape], "data": plain(array)}
            for name, array in arrays.items()
        ]
        print(json.dumps({**header, "outputs": outputs}), file=out)
        return
    for name, array in arrays.items():
        print(f"{name}  {dtype_of(array)} {json.dumps([*array.shape])}\n{array}", file=out)
