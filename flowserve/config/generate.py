"""Makes `model_config_pb2.py` and its type stub from `model_config.proto`: `python -m flowserve.config.generate`.

Decided here: the generated module is the file descriptor plus the protobuf call that turns it into classes, and not
protoc's own Python output, for two reasons (docs/decisions/0007). It stands in a descriptor pool of its own, as
Triton's client library puts the same message names into the global pool and a process may use both; and it works with
every protobuf runtime, where protoc's output refuses runtimes older than itself and all but the next major version.

Needs grpcio-tools, which only developers have. Nothing else imports this file.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

HERE: Final = Path(__file__).parent
PROTO: Final = "model_config.proto"
BYTES_PER_LINE: Final = 28

MODULE: Final = '''"""Made by flowserve/config/generate.py from model_config.proto; do not edit."""

from google.protobuf import descriptor_pool
from google.protobuf.internal import builder

POOL = descriptor_pool.DescriptorPool()
DESCRIPTOR = POOL.AddSerializedFile(
{descriptor}
)
builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, __name__, globals())
'''


def generate() -> dict[str, str]:
    """The two files by name, as they should be."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{HERE}", f"--pyi_out={out}"]
        subprocess.run([*protoc, f"--descriptor_set_out={out / 'set'}", PROTO], check=True)
        (file,) = FileDescriptorSet.FromString((out / "set").read_bytes()).file
        stub = (out / "model_config_pb2.pyi").read_text(encoding="utf-8")
    return {"model_config_pb2.py": module_text(file), "model_config_pb2.pyi": strictly_typed(stub)}


def strictly_typed(stub: str) -> str:
    """protoc's stub with the type arguments that mypy --strict wants."""
    return stub.replace("_Mapping]", "_Mapping[str, object]]").replace("**kwargs)", "**kwargs: object)")


def module_text(file: FileDescriptorProto) -> str:
    """The Python module for one proto file."""
    raw = file.SerializeToString(deterministic=True)
    lines = [f"    {raw[i : i + BYTES_PER_LINE]!r}" for i in range(0, len(raw), BYTES_PER_LINE)]
    return MODULE.format(descriptor="\n".join(lines))


def main() -> None:
    for name, text in generate().items():
        (HERE / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
