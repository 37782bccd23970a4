"""A worker process that calls one function and sends its result.

Decides how a model's code is executed once in a process of its own, for example to complete its configuration. The
result is sent as JSON, in as many messages as needed, and is complete when the process has ended. It does not know the
function, nor what the result is for.

Callers: runtime/ starts it by ENTRY and reads the result with `parse_result`.
"""

from __future__ import annotations

import json
import logging
import pickle
import socket
from typing import Any, Final

from flowserve.backends.base import Remote
from flowserve.backends.worker.protocol import MESSAGE_BYTES_MAX, decode_error, encode_error
from flowserve.errors import FlowserveError, ModelFailed, Place

ENTRY: Final = "flowserve.backends.worker.task:run_task"

log = logging.getLogger("flowserve.child")


def run_task(socket_fd: int, arguments: bytes) -> None:
    """Call the function of the pickled `Remote` in `arguments`, and send its result or error."""
    remote: Remote = pickle.loads(arguments)
    try:
        text = json.dumps({"answer": remote.call()})
    except FlowserveError as error:
        place = [error.place.file, error.place.line] if error.place else []
        text = json.dumps({"error": encode_error(error), "place": place})
    except Exception as error:
        log.exception("%s failed", remote.entry)
        text = json.dumps({"error": encode_error(ModelFailed(f"{type(error).__name__}: {error}"))})
    message = text.encode()
    with socket.socket(fileno=socket_fd) as sock:
        sock.setblocking(True)
        for start in range(0, len(message), MESSAGE_BYTES_MAX):
            sock.send(message[start : start + MESSAGE_BYTES_MAX])


def parse_result(message: bytes) -> Any:
    """The result of the function. Raises the error that it raised, ValueError for an incomplete message."""
    result = json.loads(message)
    if not isinstance(result, dict) or not result.keys() & {"answer", "error"}:
        raise ValueError("neither an answer nor an error")
    if "error" not in result:
        return result["answer"]
    error = decode_error(result["error"])
    place = result.get("place")
    if isinstance(place, list) and [*map(type, place)] == [str, int]:
        error.place = Place(place[0], place[1], 1)
    raise error
