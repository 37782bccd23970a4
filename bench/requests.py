"""One work as the bytes that travel: prebuilt requests and the numbers their answers must end with.

Decided here: every request carries one row, as a binary tensor, and asks for binary outputs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from bench.works import Array, Work


def write_requests(work: Work, folder: Path, count: int) -> None:
    """Write `<i>.request` and `<i>.answer` for `count` connections, each with a row of its own."""
    folder.mkdir(parents=True)
    rows = work.rows(count)
    answers = work.direct()(rows)
    for i in range(count):
        (folder / f"{i}.request").write_bytes(infer_request(work.name, rows[i : i + 1]))
        (folder / f"{i}.answer").write_bytes(answers[i : i + 1].astype("<f4").tobytes())


def infer_request(model: str, rows: Array, parameters: Mapping[str, int] = MappingProxyType({})) -> bytes:
    """POST /v2/models/MODEL/infer with input X = `rows` [n, *dims] in the binary tensor extension, and `parameters` of
    the request besides.
    """
    tensor = rows.astype("<f4").tobytes()
    header = json.dumps(
        {
            "inputs": [
                {
                    "name": "X",
                    "shape": list(rows.shape),
                    "datatype": "FP32",
                    "parameters": {"binary_data_size": len(tensor)},
                }
            ],
            "parameters": {"binary_data_output": True, **parameters},
        },
        separators=(",", ":"),
    ).encode()
    lines = (f"Inference-Header-Content-Length: {len(header)}", "Content-Type: application/octet-stream")
    return post(f"/v2/models/{model}/infer", lines, header + tensor)


def post(path: str, headers: tuple[str, ...], body: bytes) -> bytes:
    """A whole HTTP/1.1 request on a connection that is kept open."""
    lines = (f"POST {path} HTTP/1.1", "Host: 127.0.0.1", *headers, f"Content-Length: {len(body)}", "", "")
    return "\r\n".join(lines).encode() + body
