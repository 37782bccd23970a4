"""Makes `model_config_pb2.py` and its type stub from `model_config.proto`: `python -m flowserve.config.generate`.
The same for other proto files, for other rooms.

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

MODULE: Final = '''"""Made by {maker} from {proto}; do not edit."""

{pool}
DESCRIPTOR = POOL.AddSerializedFile(
{descriptor}
)
builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, __name__, globals())
'''

NEW_POOL: Final = """from google.protobuf import descriptor_pool
from google.protobuf.internal import builder

POOL = descriptor_pool.DescriptorPool()"""


def generate() -> dict[str, str]:
    """The two files by name, as they should be."""
    return generate_from(HERE, PROTO, "flowserve/config/generate.py", NEW_POOL)


def generate_from(folder: Path, proto: str, maker: str, pool: str) -> dict[str, str]:
    """The two files by name for `proto` in `folder`, which may import those of this folder. `pool` is Python that
    imports protobuf's builder and names the POOL.
    """
    name = proto.removesuffix(".proto")
    with tempfile.TemporaryDirectory() as made:
        out = Path(made)
        protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{folder}", f"-I{HERE}", f"--pyi_out={out}"]
        subprocess.run([*protoc, f"--descriptor_set_out={out / 'set'}", proto], check=True)
        (file,) = FileDescriptorSet.FromString((out / "set").read_bytes()).file
        stub = (out / f"{name}_pb2.pyi").read_text(encoding="utf-8")
    return {f"{name}_pb2.py": module_text(file, proto, maker, pool), f"{name}_pb2.pyi": strictly_typed(stub)}


def strictly_typed(stub: str) -> str:
    """protoc's stub with the type arguments that mypy --strict wants."""
    stub = stub.replace("_Mapping]", "_Mapping[str, object]]").replace("**kwargs)", "**kwargs: object)")
    return stub.replace("import model_config_pb2", "from flowserve.config import model_config_pb2")


def module_text(file: FileDescriptorProto, proto: str, maker: str, pool: str) -> str:
    """The Python module for one proto file."""
    raw = file.SerializeToString(deterministic=True)
    lines = [f"    {raw[i : i + BYTES_PER_LINE]!r}" for i in range(0, len(raw), BYTES_PER_LINE)]
    return MODULE.format(descriptor="\n".join(lines), proto=proto, maker=maker, pool=pool)


def main() -> None:
    for name, text in generate().items():
        (HERE / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
