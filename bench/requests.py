"""Prebuilt requests of one work, as bytes, and the numbers that their responses must end with.

Every request carries one FP32 tensor X in the binary tensor extension and asks for binary outputs.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from bench.works import Array, Work

MOST_ROWS: Final = 16  # of one request with shapes "rows"
LENGTHS: Final = (64, 16, 48, 32)  # of one row with shapes "lengths"
HEADS: Final = 4
MOST_BYTES: Final = 64 << 20  # of all requests of one folder with more than one row each


def write_requests(work: Work, folder: Path, count: int, shapes: str = "one", heads: str = "equal") -> None:
    """Write `<i>.request` and `<i>.answer` for i < `count`, each with numbers of its own.

    * `shapes`: "one" row each, 1 to MOST_ROWS "rows", or one row with "lengths" of its own (where `work.varies`).
    * `heads`: "equal", or "changing" from request to request: other HTTP headers, order of headers and JSON fields.

    Requests go to the deployments of `work` in turn. With large "rows" there are fewer than `count` requests.
    """
    folder.mkdir(parents=True)
    generator = random.Random(11)
    if shapes == "rows":
        count = min(count, max(8, MOST_BYTES // (work.rows(1).nbytes * MOST_ROWS)))
    sizes = [generator.randint(1, MOST_ROWS) if shapes == "rows" else 1 for _ in range(count)]
    everything, first = work.rows(sum(sizes)), 0
    deployments = [(deployment.name, deployment.direct()) for deployment in work.deployments]
    for i, size in enumerate(sizes):
        rows = everything[first : first + size]
        first += size
        if shapes == "lengths":
            rows = rows[:, : LENGTHS[i // HEADS % len(LENGTHS)]]
        name, direct = deployments[i % len(deployments)]
        head = i % HEADS if heads == "changing" else 0
        (folder / f"{i}.request").write_bytes(infer_request(name, rows, head=head))
        (folder / f"{i}.answer").write_bytes(direct(rows).astype("<f4").tobytes())


def infer_request(
    model: str, rows: Array, parameters: Mapping[str, int] = MappingProxyType({}), *, head: int = 0
) -> bytes:
    """POST /v2/models/MODEL/infer with input X = `rows` [n, *dims] and the `parameters` of the request.

    `head` selects one of HEADS ways to write the same request.
    """
    tensor = rows.astype("<f4").tobytes()
    size = {"binary_data_size": len(tensor)}
    x: dict[str, Any] = {"name": "X", "shape": list(rows.shape), "datatype": "FP32", "parameters": size}
    outputs = [{"name": "Y", "parameters": {"binary_data": True}}]
    body: dict[str, Any] = {"inputs": [x], "parameters": {"binary_data_output": True, **parameters}}
    if head == 1:
        body = {"id": f"request-{len(tensor)}", **dict(reversed(body.items()))}
    elif head == 2:
        body = {"inputs": [dict(reversed(x.items()))], "outputs": outputs}
    elif head == 3:
        body = {"outputs": outputs, "inputs": [x], "id": "7"}
    header = json.dumps(body, separators=None if head == 2 else (",", ":")).encode()
    lines = [f"Inference-Header-Content-Length: {len(header)}", "Content-Type: application/octet-stream"]
    if head == 1:
        lines = ["User-Agent: bench", *reversed(lines), "Accept: */*"]
    elif head == 2:
        lines = ["accept-encoding: identity", *(line.lower() for line in lines)]
    elif head == 3:
        lines = [*lines, "X-Request-Id: 4bf92f3577b34da6a3ce929d0e0e4736"]
    return post(f"/v2/models/{model}/infer", lines, header + tensor, length_first=head in (1, 2))


def post(path: str, headers: Sequence[str], body: bytes, *, length_first: bool = False) -> bytes:
    """A whole HTTP/1.1 request for a persistent connection."""
    lines = ["Host: 127.0.0.1", *headers]
    lines.insert(0 if length_first else len(lines), f"Content-Length: {len(body)}")
    return "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""]).encode() + body
