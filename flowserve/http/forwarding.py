"""Header forwarding: headers whose names fit a pattern reach models as request parameters.

Decided here: that a name fits as a whole (it arrives lower-case, as HTTP has it), which names are taken, and that a
parameter of the request's own body wins. A server without the option has the plain route.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Final

from flowserve.errors import Invalid
from flowserve.http.compression import Headers
from flowserve.http.decode import Body
from flowserve.http.infer import Decoded, InferRoute
from flowserve.http.infer_header import KNOWN_PARAMETERS, RESERVED_PREFIX
from flowserve.runtime.deployment import Deployment

_KEPT_NAMES: Final = 1024


class ForwardingInferRoute(InferRoute):
    """The inference route of a server that forwards headers."""

    def __init__(self, pattern: re.Pattern[str], *route: Any) -> None:
        super().__init__(*route)

        @lru_cache(maxsize=_KEPT_NAMES)
        def is_forwarded(name: bytes) -> bool:
            return pattern.fullmatch(name.decode("latin-1")) is not None

        self._is_forwarded = is_forwarded

    def _decode(self, headers: Headers, body: Body, deployment: Deployment) -> Decoded | None:
        decoded = super()._decode(headers, body, deployment)
        if decoded is None:
            return None
        forwarded: dict[str, Any] = {}
        for name, value in headers:
            if self._is_forwarded(name):
                key = name.decode("latin-1")
                if key in KNOWN_PARAMETERS or key.startswith(RESERVED_PREFIX):
                    raise Invalid(
                        f"the header '{key}' cannot be forwarded: as a parameter this name is reserved "
                        "(--http-header-forward-pattern)"
                    )
                forwarded[key] = value.decode("latin-1")
        if forwarded:
            request, _ = decoded
            request.parameters = {**forwarded, **request.parameters}
        return decoded
