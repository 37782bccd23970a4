"""Options of tritonserver that `flowserve run` does not implement, and the message for each.

Decides which options are refused, with the name of the missing feature; which exist under another name; which are
accepted because they request the existing behaviour, or tune a part that flowserve does not have. Callers: `main`,
`options`, `run`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from flowserve.cli.option_values import whole_number

# Options whose feature is missing, each as a phrase with its verb: the message names the feature, which helps more than
# "unknown option".
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

# The message for options that exist under another name.
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

# Switches that are accepted with the given value, the existing behaviour, and refused with the other value.
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

# Numeric options that only affect tritonserver's speed. They are accepted with a warning.
WITHOUT_EFFECT: Final[Mapping[str, str]] = {
    "--buffer-manager-thread-count": "what has to be copied is copied where it is used",
    "--grpc-infer-allocation-pool-size": "gRPC messages are not kept",
    "--grpc-infer-thread-count": "one thread serves all gRPC connections",
    "--grpc-max-response-pool-size": "gRPC messages are not kept",
    "--http-thread-count": "one event loop serves all HTTP connections",
    "--model-load-thread-count": "how many models load at once is not chosen",
}

# Built-in backends without settings for --backend-config. Backends not listed here, except onnxruntime, are plug-ins.
_WITHOUT_SETTINGS: Final = ("callable", "python", "tensorrt")


def add_arguments_without_effect(parser: argparse.ArgumentParser) -> None:
    """Add these options, hidden from the help. Those that need a warning are collected in `without_effect`."""
    for name, (value, feature) in AGREED.items():
        # A switch without a value means true.
        parser.add_argument(name, nargs="?", const="true", type=_agreed(value, feature), help=argparse.SUPPRESS)
    for name in WITHOUT_EFFECT:
        parser.add_argument(
            name, dest="without_effect", action="append", type=_number_of(name), default=[], help=argparse.SUPPRESS
        )


def settings_without_effect(settings: Sequence[tuple[str, str, str]]) -> list[str]:
    """The given backend settings that no backend reads, in the form of options."""
    return [f"--backend-config={backend},{key}" for backend, key, _ in settings if backend in _WITHOUT_SETTINGS]


def warning_of(names: Sequence[str]) -> str:
    """One line about the given options without effect."""
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
    """A parser that checks the number and returns the option's name."""
    number = whole_number(0)

    def parse(text: str) -> str:
        number(text)
        return name

    return parse
