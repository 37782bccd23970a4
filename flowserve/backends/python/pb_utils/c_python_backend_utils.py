"""The module that a `model.py` may import as `c_python_backend_utils`: the names of Triton's compiled module.

Decides which of the names of `triton_python_backend_utils` are in it. Public models import it for its classes, or to
find out whether they run in a server. Triton's `SharedMemory` and `async_event_future_done_callback` are not in it,
because only Triton's own code uses them.

Callers: models.
"""

from __future__ import annotations

from flowserve.backends.python.pb_utils.triton_python_backend_utils import (
    COUNTER,
    GAUGE,
    HISTOGRAM,
    TRITONSERVER_MEMORY_CPU,
    TRITONSERVER_MEMORY_GPU,
    InferenceRequest,
    InferenceResponse,
    InferenceResponseSender,
    InferenceTrace,
    Logger,
    MemoryType,
    Metric,
    MetricFamily,
    MetricKind,
    PreferredMemory,
    ResponseIterator,
    Tensor,
    TritonError,
    TritonModelException,
    is_model_ready,
    load_model,
    unload_model,
)

__all__ = [
    "COUNTER",
    "GAUGE",
    "HISTOGRAM",
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "InferenceTrace",
    "Logger",
    "MemoryType",
    "Metric",
    "MetricFamily",
    "MetricKind",
    "PreferredMemory",
    "ResponseIterator",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "is_model_ready",
    "load_model",
    "unload_model",
]
