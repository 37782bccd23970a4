"""TensorRT itself, behind what is used of it (tensorrt_api.py); the only file that imports it, and when it is needed.

Decided here: what is said where it cannot be imported, and that what TensorRT logs goes to our log. Experimental: not
run on hardware so far, and never in the tests, which run all that stands above it on a fake.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Final

from flowserve.backends.tensorrt_api import Allocator, Engine, MakeRoom
from flowserve.errors import Unsupported
from flowserve.memory.devices import devices

log = logging.getLogger("flowserve.tensorrt")

HOW: Final = "pip install 'flowserve[tensorrt]', where NVIDIA's own package index can be reached"


class TensorRtLibrary:
    """`TensorRt`, and what building plans needs besides: the module and its logger."""

    def __init__(self, trt: Any) -> None:
        self.trt = trt
        self.version: str = trt.__version__
        self.logger = _logger(trt)
        self._runtime = trt.Runtime(self.logger)
        trt.init_libnvinfer_plugins(self.logger, "")

    def read(self, plan: bytes) -> Engine | None:
        engine: Engine | None = self._runtime.deserialize_cuda_engine(plan)
        return engine

    def allocator(self, make_room: MakeRoom) -> Allocator:
        class OutputAllocator(self.trt.IOutputAllocator):  # type: ignore[misc, name-defined]  # known when it runs
            shape: tuple[int, ...] | None = None

            def reallocate_output_async(
                self, tensor_name: str, memory: int, size: int, alignment: int, stream: int
            ) -> int:
                return make_room(max(size, 1))

            def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:
                return make_room(max(size, 1))

            def notify_shape(self, tensor_name: str, shape: Any) -> None:
                self.shape = tuple(shape)

        made: Allocator = OutputAllocator()
        return made

    def on_device(self, number: int) -> AbstractContextManager[Any]:
        return devices()[number].device.current()


@cache
def tensorrt_library() -> TensorRtLibrary:
    """Raises Unsupported where TensorRT cannot be imported, with how to get it."""
    try:
        import tensorrt
    except ImportError as error:  # also where its bindings are there and its libraries are not
        raise Unsupported(f"TensorRT cannot be used here ({error}): {HOW}") from error
    return TensorRtLibrary(tensorrt)


def _logger(trt: Any) -> Any:
    levels = {"INTERNAL_ERROR": logging.ERROR, "ERROR": logging.ERROR, "WARNING": logging.WARNING}

    class Logger(trt.ILogger):  # type: ignore[misc]  # known when it runs
        def log(self, severity: Any, message: str) -> None:
            log.log(levels.get(severity.name, logging.DEBUG), "%s", message)

    return Logger()
