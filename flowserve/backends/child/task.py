"""A short life: one function called in a process of its own, and what it returned.

Decided here: how other people's code is asked a single question where it can break nothing. The answer comes back as
JSON, in as many messages as it takes, and is complete when the process has ended. It knows neither who asks nor what.
"""

from __future__ import annotations

import json
import logging
import pickle
import socket
from typing import Any, Final

from flowserve.backends.base import Remote
from flowserve.backends.child.main import call
from flowserve.backends.child.protocol import MESSAGE_BYTES_MAX, heard, said
from flowserve.errors import FlowserveError, ModelFailed, Place

ENTRY: Final = "flowserve.backends.child.task:answer"

log = logging.getLogger("flowserve.child")


def answer(socket_fd: int, arguments: bytes) -> None:
    """Do what `arguments`, a pickled `Remote`, say, and send what comes of it."""
    remote: Remote = pickle.loads(arguments)
    try:
        text = json.dumps({"answer": call(remote)})
    except FlowserveError as error:
        place = [error.place.file, error.place.line] if error.place else []
        text = json.dumps({"error": said(error), "place": place})
    except Exception as error:
        log.exception("%s failed", remote.entry)
        text = json.dumps({"error": said(ModelFailed(f"{type(error).__name__}: {error}"))})
    message = text.encode()
    with socket.socket(fileno=socket_fd) as sock:
        sock.setblocking(True)
        for start in range(0, len(message), MESSAGE_BYTES_MAX):
            sock.send(message[start : start + MESSAGE_BYTES_MAX])


def answered(message: bytes) -> Any:
    """What the function returned, as JSON has it. Raises what it raised, ValueError where the message is not whole."""
    told = json.loads(message)
    if not isinstance(told, dict) or not told.keys() & {"answer", "error"}:
        raise ValueError("neither an answer nor an error")
    if "error" not in told:
        return told["answer"]
    error = heard(told["error"])
    place = told.get("place")
    if isinstance(place, list) and [*map(type, place)] == [str, int]:
        error.place = Place(place[0], place[1], 1)
    raise error
