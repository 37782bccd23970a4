"""What of TensorRT is used, under its own names: the real objects are these, and so is the one under test.

Decided here: the few calls that serving a plan takes, the same in TensorRT 10 and 11, and what each side may assume.
Whatever is about the order of calls is tensorrt_run.py's to keep; testing/fake_tensorrt.py raises where it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

# Room for an output whose size TensorRT learns while it runs: called with the size in bytes, gives an address.
MakeRoom = Callable[[int], int]


class Word(Protocol):
    """A member of one of TensorRT's enumerations."""

    @property
    def name(self) -> str: ...


class Context(Protocol):
    """One execution at a time. What returns a bool says with False that it failed, and why in TensorRT's log."""

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool: ...

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool: ...

    def infer_shapes(self) -> list[str]:
        """The inputs that have no shape yet; none: every shape that is known before is."""

    def get_tensor_shape(self, name: str) -> Sequence[int]:
        """With -1 where only the execution tells."""

    def set_tensor_address(self, name: str, memory: int) -> bool: ...

    def set_output_allocator(self, name: str, output_allocator: Any) -> bool: ...

    def execute_async_v3(self, stream_handle: int) -> bool:
        """Put it on the stream. Every tensor has an address or an allocator; all memory stays until it is over."""


class Engine(Protocol):
    """A plan, ready for one GPU. Shared by contexts."""

    num_io_tensors: int
    num_optimization_profiles: int

    def get_tensor_name(self, index: int) -> str: ...

    def get_tensor_mode(self, name: str) -> Word:
        """INPUT or OUTPUT."""

    def get_tensor_dtype(self, name: str) -> Word: ...

    def get_tensor_shape(self, name: str) -> Sequence[int]: ...

    def get_tensor_location(self, name: str) -> Word:
        """DEVICE, or HOST for shape tensors."""

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> Sequence[Sequence[int]]:
        """The smallest, the best and the largest shape of an input."""

    def create_execution_context(self) -> Context | None: ...


class Allocator(Protocol):
    """What `TensorRt.allocator` makes. `shape` is known when the execution is over."""

    shape: tuple[int, ...] | None


class TensorRt(Protocol):
    """The library itself."""

    version: str

    def read(self, plan: bytes) -> Engine | None:
        """A plan for the current device; None where it is none that this version and this GPU can run."""

    def allocator(self, make_room: MakeRoom) -> Allocator:
        """An output allocator that gets its memory from `make_room`."""

    def on_device(self, number: int) -> AbstractContextManager[Any]:
        """Within it, this is the thread's current device, which TensorRT asks CUDA for."""
