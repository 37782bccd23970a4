"""What the commands that talk to a server say to it: one request, and its answer or answers, over plain HTTP.

Decided here: how a server is named, and how a refusal becomes one sentence. Tensors are tensors.py's.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, urlsplit

from flowserve.errors import FlowserveError, Invalid, Unavailable

PATIENCE_S: Final = 300.0
EVENT: Final = b"data: "  # before each server-sent event
Headers = Mapping[str, str]
MakeId = Callable[[int], int | str]
NO_HEADERS: Final[Headers] = {}


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens. `prefix` is what stands before /v2 in its paths."""

    host: str
    port: int
    is_tls: bool = False
    prefix: str = ""

    @classmethod
    def of(cls, text: str) -> Address:
        """`http://host:port/prefix`, or `host:port`. Raises Invalid."""
        try:
            parts = urlsplit(text if "://" in text else f"http://{text}")
            port = parts.port
        except ValueError:  # a bracket without its other, a port that is no number
            parts, port = urlsplit(""), None
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or not parts.hostname.isprintable()
            or " " in text
        ):
            raise Invalid(f"{text!r} is no server's URL; http://localhost:8000 is one")
        is_tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if is_tls else 8000), is_tls, quote(parts.path.rstrip("/"), safe="/%"))

    def path(self, model: str, version: str, what: str = "") -> str:
        """Of a model, or of what can be asked of it ("/infer")."""
        of_version = f"/versions/{quote(version, safe='')}" if version else ""
        return f"{self.prefix}/v2/models/{quote(model, safe='')}{of_version}{what}"

    @property
    def netloc(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.is_tls else 'http'}://{self.netloc}{self.prefix}"


def ask(
    address: Address, method: str, path: str, body: bytes = b"", headers: Headers = NO_HEADERS
) -> tuple[Headers, bytes]:
    """One exchange: the answer's headers, in lower case, and its body. Blocks. Raises Unavailable where nobody answers,
    Invalid with the server's own words where it refuses.
    """
    with _answered(address, method, path, body, headers) as answer:
        return {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def events(address: Address, path: str, body: bytes) -> Iterator[dict[str, Any]]:
    """The server-sent events of one request, each as soon as it is there. Blocks and raises as `ask` does; after the
    events before, Invalid with what the request failed with.
    """
    with _answered(address, "POST", path, body, {}) as answer:
        for line in answer:
            if line.startswith(EVENT):
                event = json.loads(line[len(EVENT) :])
                if event.keys() == {"error"}:
                    raise Invalid(f"{address} answered: {event['error']}")
                yield event


@contextmanager
def _answered(
    address: Address, method: str, path: str, body: bytes, headers: Headers
) -> Iterator[http.client.HTTPResponse]:
    make = http.client.HTTPSConnection if address.is_tls else http.client.HTTPConnection
    connection = make(address.host, address.port, timeout=PATIENCE_S)
    try:
        connection.request(method, path, body or None, dict(headers))
        answer = connection.getresponse()
        if answer.status != 200:
            raise Invalid(f"{address} answered {answer.status}: {said(answer.read())}")
        yield answer
    except (OSError, http.client.HTTPException) as error:
        raise no_answer(address, error) from None
    finally:
        connection.close()


def no_answer(address: Address, error: Exception) -> Unavailable:
    """Why, and what to look at."""
    if isinstance(error, ssl.SSLCertVerificationError):
        text = f"{error.verify_message}; SSL_CERT_FILE=FILE in front of the command names authorities to trust"
        return Unavailable(f"no answer from {address}: {text}")
    if isinstance(error, ssl.SSLError):
        return Unavailable(f"no answer from {address}: {error.reason or error}; does it speak HTTPS?")
    # A server that ends without a word is a BadStatusLine too, and a ConnectionError besides.
    if isinstance(error, http.client.BadStatusLine) and not isinstance(error, ConnectionError):
        return Unavailable(f"no answer from {address}: this does not speak HTTP; is it the gRPC port?")
    return Unavailable(f"no answer from {address}: {_shown(str(error)) or type(error).__name__}; is a server running?")


def said(content: bytes) -> str:
    """The error in an answer's body."""
    try:
        found = json.loads(content)
        return str(found["error"]) if isinstance(found, dict) and "error" in found else str(found)
    except ValueError:
        return _shown(content[:500].decode(errors="replace").strip()) or "nothing more"


def _shown(text: str) -> str:
    """What a terminal would obey, or cannot show, as a question mark; lines as they are."""
    return "".join(character if character.isprintable() or character in "\n\t" else "?" for character in text)


def metadata(address: Address, model: str, version: str = "") -> dict[str, Any]:
    """What a server says of a model's tensors. Raises FlowserveError."""
    _, content = ask(address, "GET", address.path(model, version))
    try:
        found = json.loads(content)
    except ValueError:
        found = None
    if not isinstance(found, dict) or "inputs" not in found:
        raise FlowserveError(f"{address} does not describe its models as KServe v2 has it")
    return found


def describe(address: Address, model: str, version: str = "") -> tuple[dict[str, Any], bool]:
    """The same with `optional` said of each input, and whether it answers any number of times; as far as the server
    tells how it is configured. Raises FlowserveError.
    """
    found, config = metadata(address, model, version), _configuration(address, model, version)
    optional = {tensor.get("name") for tensor in config.get("input", ()) if tensor.get("optional")}
    found["inputs"] = [{**tensor, "optional": tensor["name"] in optional} for tensor in found["inputs"]]
    return found, bool(config.get("model_transaction_policy", {}).get("decoupled"))


def sequence_ids(address: Address, model: str) -> MakeId | None:
    """What makes a number the id of a sequence of a model's requests, or of one that an ensemble is made of; None where
    they belong to none, as far as the server tells. Raises FlowserveError.
    """
    seen, waiting = {model}, [model]
    while waiting:
        config = _configuration(address, waiting.pop(), "")
        batching = config.get("sequence_batching")
        if batching is not None and not batching.get("iterative_sequence"):  # there each request is one by itself
            controls = [one for tensor in batching.get("control_input", ()) for one in tensor.get("control", ())]
            return str if any(one.get("data_type") == "TYPE_STRING" for one in controls) else int
        steps = {step["model_name"] for step in config.get("ensemble_scheduling", {}).get("step", ())} - seen
        seen |= steps
        waiting += steps
    return None


def _configuration(address: Address, model: str, version: str) -> dict[str, Any]:
    """{} where there is no such extension of the protocol."""
    try:
        found = json.loads(ask(address, "GET", address.path(model, version, "/config"))[1])
    except (Invalid, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
