"""Install a Triton server from a wheel on PyPI: `python -m bench.triton FOLDER`.

The result is one executable, `FOLDER/tritonserver REPOSITORY HTTP_PORT [OPTION...]`, for the variable TRITONSERVER.
Options of tritonserver that follow the port win over those of the launcher: it serves HTTP on the loopback only.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

WHEEL = "nvidia-pytriton==0.7.0"

# The wheel's python stub was built for numpy 1: with numpy 2 every output of a Python model is empty.
COMPANIONS = ("numpy<2", "onnxruntime")

LAUNCHER = """\
#!/bin/sh
# usage: {launcher} REPOSITORY HTTP_PORT [OPTION...]
# Its own Python comes first, so that the python backend's child processes find numpy<2 and onnxruntime.
if [ $# -lt 2 ]; then echo "usage: $0 REPOSITORY HTTP_PORT [OPTION...]" >&2; exit 2; fi
repository=$1
port=$2
shift 2
PATH={binaries}:"$PATH" LD_LIBRARY_PATH={libraries} exec {server} \\
    --model-repository="$repository" --http-address=127.0.0.1 --http-port="$port" \\
    --allow-grpc=false --allow-metrics=false \\
    --backend-directory={package}/backends --cache-directory={package}/caches --log-info=false \\
    "$@"
"""


def install(folder: Path, source: str) -> Path:
    """Make the virtual environment and the launcher; return the launcher's path. `source` is what pip installs."""
    environment = folder / "venv"
    venv.create(environment, with_pip=True, clear=True)
    python = environment / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", *COMPANIONS, source], check=True)
    return write_launcher(folder)


def write_launcher(folder: Path) -> Path:
    """Write `FOLDER/tritonserver` over an environment that is already installed."""
    series = f"{sys.version_info.major}.{sys.version_info.minor}"
    environment = folder / "venv"
    packages = environment / "lib" / f"python{series}" / "site-packages"
    package = packages / "pytriton" / "tritonserver"
    stub = package / "python_backend_stubs" / series / "triton_python_backend_stub"
    if not stub.is_file():
        raise SystemExit(f"bench.triton: the wheel has no python backend stub for Python {series}: {stub} is missing")

    installed = package / "backends" / "python" / stub.name
    shutil.copyfile(stub, installed)
    installed.chmod(0o755)
    server = package / "bin" / "tritonserver"
    server.chmod(0o755)

    # The stub is linked to libpython of the interpreter from which the environment was made.
    libraries = f"{Path(sys.base_prefix) / 'lib'}:{packages / 'nvidia_pytriton.libs'}"
    launcher = folder / "tritonserver"
    launcher.write_text(
        LAUNCHER.format(
            launcher=launcher.name,
            binaries=shlex.quote(str(environment / "bin")),
            libraries=shlex.quote(libraries),
            server=shlex.quote(str(server)),
            package=shlex.quote(str(package)),
        )
    )
    launcher.chmod(0o755)
    return launcher


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.triton", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to put the virtual environment and the launcher")
    parser.add_argument("--wheel", default=WHEEL, help=f"what pip installs: a requirement or a file (default {WHEEL})")
    options = parser.parse_args(arguments)
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise SystemExit("bench.triton: the wheel exists for Linux on x86-64 only")
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    launcher = install(folder, options.wheel)
    print(f"export TRITONSERVER={shlex.quote(str(launcher))}")


if __name__ == "__main__":
    main()
