"""What `flowserve run` can be told about GPUs.

Decided here: names, defaults and limits of these options: tritonserver's, but for `--gpu`, which it does not have. How
much the pools hold by default is memory/devices.py's.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field

from flowserve.cli.option_values import one_of, whole_number


@dataclass(frozen=True, slots=True)
class GpuChoice:
    """`gpu_pool_bytes` are by a GPU's number. None, and a GPU that is not there: the default."""

    is_allowed: bool = True
    pinned_pool_bytes: int | None = None
    gpu_pool_bytes: Mapping[int, int] = field(default_factory=dict)


def add_gpu_arguments(parser: argparse.ArgumentParser) -> None:
    """The group of options."""
    group = parser.add_argument_group("GPUs")
    group.add_argument(
        "--gpu",
        metavar="auto|off",
        type=one_of("auto", "off"),
        default="auto",
        help="auto (default): the GPUs of this machine; off: models that ask for one run on the CPU",
    )
    group.add_argument(
        "--pinned-memory-pool-byte-size",
        metavar="BYTES",
        type=whole_number(0),
        help="pinned host memory for what goes to GPUs and comes back; default 256 MiB",
    )
    group.add_argument(
        "--cuda-memory-pool-byte-size",
        metavar="GPU:BYTES",
        type=_pool,
        action="append",
        default=[],
        help="memory of a GPU for tensors between steps; default 1 GiB; repeatable",
    )


def gpu_choice(arguments: argparse.Namespace) -> GpuChoice:
    """What was said. Of a GPU that was named twice the last counts, as on tritonserver."""
    return GpuChoice(
        arguments.gpu == "auto", arguments.pinned_memory_pool_byte_size, dict(arguments.cuda_memory_pool_byte_size)
    )


def _pool(text: str) -> tuple[int, int]:
    number, colon, nbytes = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"expected GPU:BYTES, got {text!r}")
    parse = whole_number(0)
    return parse(number), parse(nbytes)
