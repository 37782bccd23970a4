"""The options of an engine.

Decides which options there are, and their defaults. cli/ decides their syntax on a command line, the parts of the
engine their effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flowserve.config.types import NO_GPUS, Gpus
from flowserve.runtime.engine.wings import Wing
from flowserve.runtime.factory import PYTHON_EXECUTION
from flowserve.runtime.tracing.traces import TraceOptions
from flowserve.runtime.workers.supervisor import DELAYS, Delays
from flowserve.scheduling.rate_limit.limiter import Available
from flowserve.version import SERVER_NAME


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """`python_execution`: "process", "thread" or "inline". `gpus`: the GPUs that instances may use.
    `rate_limit`: None is off; else the declared resources; if empty, the needs of the models decide.
    `backend_settings`: by backend, the settings for all its models ("default-max-batch-size", and the backend's own);
    integers for onnxruntime.
    `cache_bytes`: the size limit of the response cache, None for no cache.
    `summaries`: compute quantiles of the last minute's durations.
    `model_config_name`: the named configuration that is used for models that have it.
    `answers_at_timeout`: the default for deployments, see `AdmissionOptions`.
    `strict_configs`: models load with exactly the configuration that they have; nothing completes it.
    `load_retries`: how often a failed load of a model is repeated.
    `server_name`: the name in server metadata.
    `strict_outputs`: an output of a `model.py` that differs from its configuration, or is missing, is an error.
    `wings`: the parts outside of the core that take part.
    `tells_names`: errors for a name that is unknown or not ready may contain other names and reasons.
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
    answers_at_timeout: bool = False
    strict_outputs: bool = False
    strict_configs: bool = False
    load_retries: int = 0
    tells_names: bool = True
    server_name: str = SERVER_NAME
    wings: tuple[Wing, ...] = ()

    def wing_of(self, model: str) -> Wing | None:
        """The wing that loads the model of that name; None: the server does."""
        return next((wing for wing in self.wings if model in wing.models), None)
