"""Options of tritonserver for which `flowserve run` has nothing to do, and what is said to whoever gives one.

Decided here: which are refused, and the feature that each of them stands for; where the same thing has another name;
which are taken because they ask for what happens anyway, or tune what is not here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from flowserve.cli.option_values import whole_number

# Options of tritonserver whose feature this server does not have, each with its verb. Naming the feature beats "unknown
# option", and both beat silence.
NOT_YET: Final[Mapping[str, str]] = {
    "--backend-directory": "a directory of backends (third-party backends are Python packages with an entry point) is",
    "--cache-directory": "other caches than the local one are",
    "--cuda-virtual-address-size": "CUDA memory pools are",
    "--enable-peer-access": "CUDA peer access is",
    "--host-policy": "host policies are",
    "--id": "naming the server is",
    "--min-supported-compute-capability": "choosing GPUs by what they can compute is",
    "--model-load-gpu-limit": "GPU memory limits are",
    "--model-load-retry-count": "retrying loads is",
    "--repoagent-directory": "repository agents are",
    "--sagemaker-port": "SageMaker's endpoints are",
    "--sagemaker-safe-port-range": "SageMaker's endpoints are",
    "--sagemaker-thread-count": "SageMaker's endpoints are",
    "--vertex-ai-default-model": "Vertex AI's endpoints are",
    "--vertex-ai-port": "Vertex AI's endpoints are",
    "--vertex-ai-thread-count": "Vertex AI's endpoints are",
}

# Said instead of "not supported", where the thing exists under another name.
INSTEAD: Final[Mapping[str, str]] = {
    "--model-repository": "the repository is named without an option: flowserve run REPO",
    "--model-store": "the repository is named without an option: flowserve run REPO",
    "--port": "the option is --http-port",
    "--host": "the option is --http-address",
    "--trace-file": "the option is --trace-config triton,file=PATH",
    "--trace-level": "the option is --trace-config level=LEVEL",
    "--trace-rate": "the option is --trace-config rate=N",
    "--trace-count": "the option is --trace-config count=N",
    "--trace-log-frequency": "the option is --trace-config triton,log-frequency=N",
    "--response-cache-byte-size": "the option is --cache-config local,size=BYTES",
}

# Switches that are taken as they are said here, which is what happens anyway; the other way they are refused.
AGREED: Final[Mapping[str, tuple[bool, str]]] = {
    "--allow-http": (True, "serving without HTTP is"),
    "--allow-sagemaker": (False, "SageMaker's endpoints are"),
    "--allow-vertex-ai": (False, "Vertex AI's endpoints are"),
    "--disable-auto-complete-config": (False, "serving without completing configurations is"),
    "--model-namespacing": (False, "model namespacing is"),
    "--reuse-grpc-port": (False, "sharing a port between servers is"),
    "--reuse-http-port": (False, "sharing a port between servers is"),
    "--strict-model-config": (False, "serving without completing configurations is"),
}

# Numbers that change how fast tritonserver is and nothing that it answers; whoever gives one is told so.
WITHOUT_EFFECT: Final[Mapping[str, str]] = {
    "--buffer-manager-thread-count": "what has to be copied is copied where it is used",
    "--grpc-infer-allocation-pool-size": "gRPC messages are not kept",
    "--grpc-infer-thread-count": "one thread serves all gRPC connections",
    "--grpc-max-response-pool-size": "gRPC messages are not kept",
    "--http-thread-count": "one event loop serves all HTTP connections",
    "--model-load-thread-count": "how many models load at once is not chosen",
}

# Backends that are told nothing by --backend-config. Others than these and onnxruntime are somebody else's packages.
_WITHOUT_SETTINGS: Final = ("callable", "python", "tensorrt")


def add_arguments_without_effect(parser: argparse.ArgumentParser) -> None:
    """Takes them, and leaves them out of the help. The names of those to be warned of are in `without_effect`."""
    for name, (value, feature) in AGREED.items():
        # A switch without a value is on.
        parser.add_argument(name, nargs="?", const="true", type=_agreed(value, feature), help=argparse.SUPPRESS)
    for name in WITHOUT_EFFECT:
        parser.add_argument(
            name, dest="without_effect", action="append", type=_number_of(name), default=[], help=argparse.SUPPRESS
        )


def settings_without_effect(settings: Sequence[tuple[str, str, str]]) -> list[str]:
    """Of the backends' settings that were given, those that nobody reads, as options."""
    return [f"--backend-config={backend},{key}" for backend, key, _ in settings if backend in _WITHOUT_SETTINGS]


def warning_of(names: Sequence[str]) -> str:
    """One line about options without effect that were given."""
    reasons = {name: WITHOUT_EFFECT.get(name, "this backend has no settings") for name in names}
    return "without effect here: " + ", ".join(f"{name} ({reason})" for name, reason in reasons.items())


def _agreed(value: bool, feature: str) -> Callable[[str], bool]:
    words = ("true", "1") if value else ("false", "0")

    def parse(text: str) -> bool:
        if text.lower() not in words:
            raise argparse.ArgumentTypeError(f"{feature} not supported yet; only {words[0]} is taken")
        return value

    return parse


def _number_of(name: str) -> Callable[[str], str]:
    """A parser of numbers that tells only that there was one."""
    number = whole_number(0)

    def parse(text: str) -> str:
        number(text)
        return name

    return parse
