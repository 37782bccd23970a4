"""`flowserve build-plan`: compiles an ONNX file into a TensorRT plan, on the GPU that will serve it.

Decides the syntax of shape ranges on the command line, and where the plan is written. Does not know TensorRT
(`backends`).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TextIO

from flowserve.backends.tensorrt.library import Ranges, Shape, build_plan, tensorrt_library
from flowserve.errors import Invalid

MEBIBYTE = 1 << 20


def build(parsed: argparse.Namespace, out: TextIO) -> None:
    """Write the plan, and one line about it to `out`. Raises FlowserveError."""
    library = tensorrt_library()
    output, workspace_bytes = Path(parsed.output), parsed.workspace_mib * MEBIBYTE
    try:
        onnx = parsed.model.read_bytes()
        with library.on_device(parsed.gpu):
            plan = build_plan(library, onnx, parsed.profile, half=parsed.fp16, workspace_bytes=workspace_bytes)
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_bytes(plan)
    except OSError as error:
        raise Invalid(f"{error.filename}: {error.strerror}") from None
    print(f"{output}: {len(plan)} bytes, for GPUs like gpu{parsed.gpu} and TensorRT {library.version}", file=out)


def profile(text: str) -> Ranges:
    """ "X:1x4:8x4:16x4,Z:1:8:16": the smallest, best and largest shape of each varying input."""
    ranges: dict[str, tuple[Shape, Shape, Shape]] = {}
    for part in text.split(","):
        name, *written = part.rsplit(":", 3)
        try:
            smallest, best, largest = (tuple(int(size) for size in shape.split("x")) for shape in written)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"expected NAME:MIN:OPT:MAX[,...], as X:1x4:8x4:16x4, got {text!r}"
            ) from None
        is_ordered = all(0 <= low <= at <= high for low, at, high in zip(smallest, best, largest, strict=False))
        if not (name and is_ordered and len(smallest) == len(best) == len(largest)):
            raise argparse.ArgumentTypeError(f"the shapes of {part!r} do not grow from the smallest to the largest")
        ranges[name] = smallest, best, largest
    return ranges
