"""The operator's options for the HTTP API."""

from __future__ import annotations

from dataclasses import dataclass, field

from flowserve.http.server.limits import MAX_BODY_BYTES
from flowserve.memory.client_memory import ClientMemory
from flowserve.observe.log_settings import LogSettings
from flowserve.observe.metrics_choice import EVERYTHING, MetricsChoice
from flowserve.runtime.protocol.request_parameters import Forwarding
from flowserve.runtime.protocol.restriction import Restriction


@dataclass(frozen=True, slots=True)
class AppOptions:
    """`max_body_bytes` bounds bodies that another ASGI server passes on in pieces, and compressed ones, expanded;
    flowserve's own server refuses others earlier. `client_memory` and `log` are shared by all front ends of one
    engine. `forwarding`: the headers that become parameters of inference requests. `metrics` None: there are none.
    """

    max_body_bytes: int = MAX_BODY_BYTES
    client_memory: ClientMemory = field(default_factory=ClientMemory)
    restrictions: tuple[Restriction, ...] = ()
    forwarding: Forwarding | None = None
    metrics: MetricsChoice | None = EVERYTHING
    log: LogSettings = field(default_factory=LogSettings)
