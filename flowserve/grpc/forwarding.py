"""Header forwarding over gRPC: a service that hands a call's metadata on as request parameters.

Decided here: that what is text in a call's metadata is meant (names that end in -bin hold bytes), and that a stream's
go with each of its requests. Which of them go along is runtime/request_parameters.py's. A server without the option
has the plain service.
"""

from __future__ import annotations

from typing import Any

from flowserve.grpc.decode import Asked
from flowserve.grpc.reader import Incoming
from flowserve.grpc.service import Service
from flowserve.grpc.stream import Whole
from flowserve.runtime.request_parameters import Forwarding


class ForwardingService(Service):
    """The service of a server that forwards headers."""

    def __init__(self, forwarding: Forwarding, *service: Any) -> None:
        super().__init__(*service)
        self._forwarding = forwarding

    def _whole(self, context: Any) -> Whole:
        headers = [(name, value) for name, value in context.invocation_metadata() or () if isinstance(value, str)]

        def with_headers(message: Incoming) -> Asked:
            asked = message.right()
            self._forwarding.add(asked.request, headers)
            return asked

        return with_headers
