"""`flowserve infer`: sends one request to a server and prints its response, or each response of a decoupled model.

Decides the output: arrays as text, or one line of JSON per response with `--json`; each response on arrival.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowserve.cli import tensors
from flowserve.cli.client import Address, ask, describe, events
from flowserve.cli.option_values import request_parameter
from flowserve.errors import Invalid
from flowserve.values import Array


def execute(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Send the request and print the response. Raises FlowserveError."""
    parameters = dict(arguments.parameter)
    if arguments.sequence_id is not None:
        _, found = request_parameter(f"sequence_id={arguments.sequence_id}")
        is_id = type(found) in (int, str)  # 1.5 and true are not ids, so they are taken as text
        parameters["sequence_id"] = found if is_id else arguments.sequence_id
        parameters |= {"sequence_start": arguments.sequence_start, "sequence_end": arguments.sequence_end}
    elif arguments.sequence_start or arguments.sequence_end:
        parser.error("--sequence-start and --sequence-end have no effect without --sequence-id")
    model, version, outputs = arguments.model, str(arguments.model_version or ""), arguments.output
    address = Address.of(arguments.url)
    described, is_decoupled = describe(address, model, version)
    inputs = tensors.read_inputs(arguments.input, described)
    if is_decoupled:
        shown = _shown(described, model, outputs)
        # Over HTTP, streamed responses are plain JSON.
        path = address.path(model, version, "/generate_stream")
        for event in events(address, path, tensors.flat_body(inputs, described, parameters)):
            _show(*tensors.read_flat_answer(event, shown), as_json=arguments.json)
            sys.stdout.flush()
        return 0
    body, headers = tensors.InferBody(inputs, [word.partition("=")[0] for word in outputs]).of(parameters)
    header, arrays = tensors.read_answer(*ask(address, "POST", address.path(model, version, "/infer"), body, headers))
    files = {name: Path(file) for name, equals, file in (word.partition("=") for word in outputs) if equals}
    for name, file in files.items():
        tensors.write_output(arrays[name], file)
    _show(header, {name: array for name, array in arrays.items() if name not in files}, as_json=arguments.json)
    for name, file in files.items() if not arguments.json else ():
        print(f"{name}  written to {file}")
    return 0


def _shown(described: Mapping[str, Any], model: str, outputs: Sequence[str]) -> dict[str, Any]:
    """The descriptions of the outputs of a decoupled model that are printed. Raises Invalid."""
    known = {tensor["name"]: tensor for tensor in described["outputs"]}
    for word in outputs:
        if "=" in word:
            raise Invalid(f"--output {word}: '{model}' answers any number of times; only names are taken here")
        if word not in known:
            raise Invalid(f"--output {word}: the model has no such output; it has {', '.join(known)}")
    return {name: known[name] for name in outputs or known}


def _show(header: Mapping[str, Any], arrays: Mapping[str, Array], *, as_json: bool) -> None:
    if as_json:
        outputs = [
            {
                "name": name,
                "datatype": tensors.dtype_of(array).wire,
                "shape": [*array.shape],
                "data": tensors.plain(array),
            }
            for name, array in arrays.items()
        ]
        print(json.dumps({**header, "outputs": outputs}))
        return
    for name, array in arrays.items():
        print(f"{name}  {tensors.dtype_of(array)} {json.dumps([*array.shape])}\n{array}")
