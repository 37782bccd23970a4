"""`flowserve build-plan`: compiles an ONNX file into a TensorRT plan, on the GPU that will serve it.

Decides where the plan is written. Does not know TensorRT (`backends`).
"""

from __future__ import annotations

import argparse

from flowserve.backends.tensorrt.library import build_plan, tensorrt_library
from flowserve.errors import Invalid

MEBIBYTE = 1 << 20


def execute(parsed: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Write the plan, and print one line about it. Raises FlowserveError."""
    library = tensorrt_library()
    output, workspace_bytes = parsed.output, parsed.workspace_mib * MEBIBYTE
    try:
        onnx = parsed.model.read_bytes()
        with library.on_device(parsed.gpu):
            plan = build_plan(library, onnx, parsed.profile, half=parsed.fp16, workspace_bytes=workspace_bytes)
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_bytes(plan)
    except OSError as error:
        raise Invalid(f"{error.filename}: {error.strerror}") from None
    if not parsed.quiet:
        print(f"{output}: {len(plan)} bytes, for GPUs like gpu{parsed.gpu} and TensorRT {library.version}")
    return 0
