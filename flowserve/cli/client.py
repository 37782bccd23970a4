"""HTTP client of the commands that talk to a server: one request and its response or responses, over plain HTTP.

Decides how a server is named, and how an error becomes one sentence. Does not know tensors (`tensors`). Callers:
`infer`, `bench`, `load`.
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
EVENT: Final = b"data: "  # prefix of each server-sent event
Headers = Mapping[str, str]
MakeId = Callable[[int], int | str]
NO_HEADERS: Final[Headers] = {}


@dataclass(frozen=True, slots=True)
class Address:
    """A server's address. `prefix` precedes /v2 in its paths."""

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
        except ValueError:  # an unmatched bracket, or a port that is not a number
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
        """The path of a model, or of one of its endpoints (`what`, for example "/infer")."""
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
    """One exchange: the response's headers, in lower case, and its body. Blocks. Raises Unavailable without a response,
    Invalid with the server's own message for an error status.
    """
    with _answered(address, method, path, body, headers) as answer:
        return {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def events(address: Address, path: str, body: bytes) -> Iterator[dict[str, Any]]:
    """The server-sent events of one request, each on arrival. Blocks and raises as `ask` does, and raises Invalid with
    the error if the request fails after some events.
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
            raise Invalid(f"{address} answered {answer.status}: {error_text(answer.read())}")
        yield answer
    except (OSError, http.client.HTTPException) as error:
        raise no_answer(address, error) from None
    finally:
        connection.close()


def no_answer(address: Address, error: Exception) -> Unavailable:
    """The error for a missing response: the reason, and what to check."""
    if isinstance(error, ssl.SSLCertVerificationError):
        text = f"{error.verify_message}; SSL_CERT_FILE=FILE in front of the command names authorities to trust"
        return Unavailable(f"no answer from {address}: {text}")
    if isinstance(error, ssl.SSLError):
        return Unavailable(f"no answer from {address}: {error.reason or error}; does it speak HTTPS?")
    # A server that closes without a response is a BadStatusLine and a ConnectionError.
    if isinstance(error, http.client.BadStatusLine) and not isinstance(error, ConnectionError):
        return Unavailable(f"no answer from {address}: this does not speak HTTP; is it the gRPC port?")
    return Unavailable(f"no answer from {address}: {_shown(str(error)) or type(error).__name__}; is a server running?")


def error_text(content: bytes) -> str:
    """The error message in a response body."""
    try:
        found = json.loads(content)
        return str(found["error"]) if isinstance(found, dict) and "error" in found else str(found)
    except ValueError:
        return _shown(content[:500].decode(errors="replace").strip()) or "nothing more"


def _shown(text: str) -> str:
    """Unprintable characters, terminal control codes included, as question marks; line breaks stay."""
    return "".join(character if character.isprintable() or character in "\n\t" else "?" for character in text)


def describe(address: Address, model: str, version: str = "") -> tuple[dict[str, Any], bool]:
    """A model's metadata with `optional` added to each input, and whether the model is decoupled. Both are read from
    the model's configuration, if the server shows it. Raises FlowserveError.
    """
    _, content = ask(address, "GET", address.path(model, version))
    try:
        found = json.loads(content)
    except ValueError:
        found = None
    if not isinstance(found, dict) or "inputs" not in found:
        raise FlowserveError(f"{address} does not describe its models as KServe v2 has it")
    config = _configuration(address, model, version)
    optional = {tensor.get("name") for tensor in config.get("input", ()) if tensor.get("optional")}
    found["inputs"] = [{**tensor, "optional": tensor["name"] in optional} for tensor in found["inputs"]]
    return found, bool(config.get("model_transaction_policy", {}).get("decoupled"))


def sequence_ids(address: Address, model: str) -> MakeId | None:
    """The function that makes a sequence id from a number, for a model with sequences or an ensemble with such a model;
    None without sequences, or if the server does not show the configuration. Raises FlowserveError.
    """
    seen, waiting = {model}, [model]
    while waiting:
        config = _configuration(address, waiting.pop(), "")
        if (make := id_maker(config)) is not None:
            return make
        steps = {step["model_name"] for step in config.get("ensemble_scheduling", {}).get("step", ())} - seen
        seen |= steps
        waiting += steps
    return None


def id_maker(config: Mapping[str, Any]) -> MakeId | None:
    """As `sequence_ids`, for a model's configuration as JSON."""
    batching = config.get("sequence_batching")
    if batching is None or batching.get("iterative_sequence"):  # there each request is its own sequence
        return None
    controls = [one for tensor in batching.get("control_input", ()) for one in tensor.get("control", ())]
    return str if any(one.get("data_type") == "TYPE_STRING" for one in controls) else int


def _configuration(address: Address, model: str, version: str) -> dict[str, Any]:
    """The model's configuration; {} if the server lacks that extension."""
    try:
        found = json.loads(ask(address, "GET", address.path(model, version, "/config"))[1])
    except (Invalid, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
