"""What the operator chose for an engine.

Decided here: nothing but what can be chosen, and what holds where nothing was said. How it is written on a command line
is cli/'s, what follows from it the engine's parts'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flowserve.config.instances import NO_GPUS, Gpus
from flowserve.runtime.tracing.traces import TraceOptions
from flowserve.runtime.workers.factory import PYTHON_EXECUTION
from flowserve.scheduling.backoff import DELAYS, Delays
from flowserve.scheduling.rate_limit.limiter import Available


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the operator chose. `python_execution`: "process", "thread" or "inline". `gpus` are those that
    instances may be on.
    `rate_limit`: None is off; else the resources that were given, none of them meaning that models' own needs decide.
    `backend_settings`: by backend, what the operator says for all its models ("default-max-batch-size", and what the
    backend knows); of whole numbers where the backend is onnxruntime.
    `cache_bytes`: how much the answers that are remembered may weigh, None for no such cache.
    `summaries`: quantiles of the last minute's durations are worked out.
    `model_config_name`: which of the configurations that models have by name counts, where they have it.
    `tells_names`: whoever asks for what is not there, or not ready, may read the names of others, and why.
    """

    python_execution: str = PYTHON_EXECUTION
    gpus: Gpus = NO_GPUS
    strict_readiness: bool = True
    rate_limit: tuple[Available, ...] | None = None
    restarts: Delays = DELAYS
    cache_bytes: int | None = None
    backend_settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    trace: TraceOptions = field(default_factory=TraceOptions)
    summaries: bool = False
    model_config_name: str = ""
    tells_names: bool = True
