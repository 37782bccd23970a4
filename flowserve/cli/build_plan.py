"""`flowserve build-plan`: an ONNX file becomes a TensorRT plan, on the GPU that will serve it.

Decided here: how ranges of shapes are written on the command line, and where the plan goes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TextIO

from flowserve.backends.tensorrt_build import Ranges, Shape, build_plan
from flowserve.backends.tensorrt_library import tensorrt_library
from flowserve.errors import FlowserveError

MEBIBYTE = 1 << 20


def build(parsed: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    """Returns the exit status."""
    try:
        library = tensorrt_library()
        onnx = parsed.model.read_bytes()
        with library.on_device(parsed.gpu):
            plan = build_plan(
                library, onnx, parsed.profile, half=parsed.fp16, workspace_bytes=parsed.workspace_mib * MEBIBYTE
            )
        output: Path = parsed.output
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_bytes(plan)
    except FlowserveError as error:
        print(f"flowserve: {error}", file=err)
        return 1
    except OSError as error:
        print(f"flowserve: {error.filename}: {error.strerror}", file=err)
        return 1
    print(f"{output}: {len(plan)} bytes, for GPUs like gpu{parsed.gpu} and TensorRT {library.version}", file=out)
    return 0


def profile(text: str) -> Ranges:
    """ "X:1x4:8x4:16x4,Z:1:8:16": the smallest, best and largest shape of each input that varies."""
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
