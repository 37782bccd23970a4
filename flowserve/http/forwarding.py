"""Header forwarding over HTTP: the inference route of a server that hands headers on as request parameters.

Decided here: that headers are text as HTTP/1.1 has it, Latin-1. Which of them go along is
runtime/request_parameters.py's. A server without the option has the plain route.
"""

from __future__ import annotations

from typing import Any

from flowserve.http.asked import Asked
from flowserve.http.compression import Headers
from flowserve.http.decode import Body
from flowserve.http.infer import Decoded, InferRoute
from flowserve.runtime.deployment import Deployment
from flowserve.runtime.request_parameters import Forwarding
from flowserve.values import Request


class ForwardingInferRoute(InferRoute):
    """The inference route of a server that forwards headers."""

    def __init__(self, forwarding: Forwarding, *route: Any) -> None:
        super().__init__(*route)
        self._forwarding = forwarding

    def read(self, asked: Asked, length: int | None, body: Body, deployment: Deployment) -> Decoded:
        decoded = super().read(asked, length, body, deployment)
        forward(self._forwarding, asked.headers, decoded[0])
        return decoded


def forward(forwarding: Forwarding, headers: Headers, request: Request) -> None:
    """Put the headers that fit among the request's parameters. Raises Invalid."""
    forwarding.add(request, ((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers))
