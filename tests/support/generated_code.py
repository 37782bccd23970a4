"""Generates the `_pb2.py` modules of `config` and `grpc` from the proto files:
`python -m tests.support.generated_code`. Their type stubs are made by the build (hatch_build.py).

Decides: a generated module is the file descriptor and the protobuf call that turns it into classes, instead of protoc's
own Python output, for two reasons (docs/decisions/0007). All of them share a descriptor pool of their own, because
Triton's client library puts the same message names into the global pool and a process may use both; and they work with
every protobuf runtime, whereas protoc's output refuses runtimes older than itself and all but the next major version.

Needs grpcio-tools.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from pprint import pformat
from typing import Final

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

import flowserve

PACKAGE: Final = Path(flowserve.__file__).parent
CONFIG_PROTO: Final = "config/model_config.proto"
PROTOS: Final = (CONFIG_PROTO, "elsewhere/placement.proto", "grpc/service.proto", "grpc/health.proto")

_MODULE: Final = '''"""Made by tests/support/generated_code.py from {proto}; do not edit."""

{pool}
DESCRIPTOR = POOL.AddSerializedFile(
{descriptor}
)
builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, __name__, globals())
'''
_NEW_POOL: Final = """from google.protobuf import descriptor_pool
from google.protobuf.internal import builder

POOL = descriptor_pool.DescriptorPool()"""
_SHARED_POOL: Final = """from google.protobuf.internal import builder

from flowserve.config.model_config_pb2 import POOL
"""


def generate() -> dict[Path, str]:
    """The text of each generated file, by path."""
    texts: dict[Path, str] = {}
    for proto in PROTOS:
        path = PACKAGE / proto
        with tempfile.TemporaryDirectory() as made:
            out = Path(made)
            folders = (f"-I{path.parent}", f"-I{PACKAGE / 'config'}")
            protoc = [sys.executable, "-m", "grpc_tools.protoc", *folders, f"--descriptor_set_out={out / 'set'}"]
            subprocess.run([*protoc, path.name], check=True)
            (file,) = FileDescriptorSet.FromString((out / "set").read_bytes()).file
        texts[path.with_name(f"{path.stem}_pb2.py")] = _module_text(file, proto)
    return texts


def _module_text(file: FileDescriptorProto, proto: str) -> str:
    descriptor = pformat(file.SerializeToString(deterministic=True), width=118)
    pool = _NEW_POOL if proto == CONFIG_PROTO else _SHARED_POOL
    return _MODULE.format(descriptor=descriptor, proto=Path(proto).name, pool=pool)


if __name__ == "__main__":
    for path, text in generate().items():
        path.write_text(text, encoding="utf-8")
