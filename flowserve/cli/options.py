"""What `flowserve run` can be told: its options and their limits.

Decided here: names (tritonserver's, where it has one), defaults (safe ones) and what each value may be. What an option
does is decided where it acts; this file only turns words into a checked `RunOptions`.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from flowserve.cli.gpu_options import GpuChoice, add_gpu_arguments, gpu_choice
from flowserve.cli.grpc_options import GrpcChoice, add_grpc_arguments, grpc_choice, grpc_contradiction
from flowserve.cli.metrics_options import (
    MetricsOptions,
    add_metrics_arguments,
    metrics_contradiction,
    metrics_options,
)
from flowserve.cli.option_values import (
    ONNXRUNTIME_SETTINGS,
    backend_setting,
    boolean,
    file_stem,
    local_cache,
    one_of,
    pattern,
    resource,
    restriction,
    whole_number,
)
from flowserve.cli.trace_options import TraceSetting, trace_choice, trace_setting
from flowserve.observe.log_settings import LogChoice

if TYPE_CHECKING:
    from flowserve.runtime.restriction import Restriction

MEBIBYTE: Final = 1 << 20
ControlMode = Literal["none", "poll", "explicit"]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the operator asked for. Sizes in bytes, times in seconds. A resource is its name, how many there are, and
    the device, None for each. `python_execution` None: what this system is best at. `http_certificate`: the server's,
    its key, and the authority of clients' certificates; None is plain HTTP. `http_address` may be
    unix:PATH.
    """

    repositories: tuple[Path, ...]
    http_address: str = "127.0.0.1"
    http_port: int = 8000
    http_max_input_size: int = 64 * MEBIBYTE
    http_certificate: tuple[Path, Path, Path | None] | None = None
    http_restrictions: tuple[Restriction, ...] = ()
    http_header_forward_pattern: re.Pattern[str] | None = None
    metrics: MetricsOptions = field(default_factory=MetricsOptions)
    grpc: GrpcChoice = field(default_factory=GrpcChoice)
    allow_client_shm: bool = False
    backend_settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    exit_timeout_s: int = 30
    exit_on_error: bool = True
    strict_readiness: bool = True
    python_execution: str | None = None
    gpu: GpuChoice = field(default_factory=GpuChoice)
    model_control_mode: ControlMode = "none"
    load_models: tuple[str, ...] = ()
    model_config_name: str = ""
    repository_poll_s: int = 15
    rate_limit: bool = False
    rate_limit_resources: tuple[tuple[str, int, int | None], ...] = ()
    cache_bytes: int | None = None
    trace: tuple[TraceSetting, ...] = ()
    log: LogChoice = field(default_factory=LogChoice)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything `flowserve run` takes. The repository is optional here, so that a misspelt option is named first."""
    parser.add_argument(
        "repositories",
        metavar="REPO",
        nargs="*",
        type=Path,
        help="the model repository, a folder of model folders; several are served as one",
    )

    http = parser.add_argument_group("where it listens")
    http.add_argument(
        "--http-address",
        metavar="ADDRESS",
        default="127.0.0.1",
        help="default %(default)s: this machine only; 0.0.0.0 for all; unix:PATH for a socket in the file system",
    )
    http.add_argument(
        "--http-port",
        metavar="PORT",
        type=whole_number(0, 65535),
        default=8000,
        help="default %(default)s; 0 picks a free one and prints it",
    )
    http.add_argument(
        "--http-max-input-size",
        metavar="BYTES",
        type=whole_number(1),
        default=64 * MEBIBYTE,
        help="largest request body, after decompression; default %(default)s",
    )
    http.add_argument("--http-server-cert", metavar="FILE", type=Path, help="serve HTTPS with this certificate (PEM)")
    http.add_argument("--http-server-key", metavar="FILE", type=Path, help="its key")
    http.add_argument(
        "--http-root-cert", metavar="FILE", type=Path, help="clients must have a certificate of this authority"
    )
    http.add_argument(
        "--http-restricted-api",
        metavar="GROUP,...:HEADER=VALUE",
        type=restriction,
        action="append",
        default=[],
        help="these groups of endpoints only answer to this header: health, metadata, inference, shared-memory, "
        "model-config, model-repository, statistics, trace, logging; repeatable",
    )
    http.add_argument(
        "--http-header-forward-pattern",
        metavar="REGEX",
        type=pattern,
        help="headers of such names reach models as request parameters",
    )
    http.add_argument(
        "--allow-client-shm",
        metavar="BOOL",
        type=boolean,
        default=False,
        help="clients may register shared memory of this machine for tensors; default false",
    )

    add_grpc_arguments(parser)
    add_metrics_arguments(parser)

    models = parser.add_argument_group("how models are loaded and run")
    models.add_argument(
        "--exit-on-error",
        metavar="BOOL",
        type=boolean,
        default=True,
        help="stop when a model fails to load at start; default true",
    )
    models.add_argument(
        "--strict-readiness",
        metavar="BOOL",
        type=boolean,
        default=True,
        help="ready only while all models are; default true",
    )
    models.add_argument(
        "--model-control-mode",
        metavar="MODE",
        type=one_of("none", "poll", "explicit"),
        default="none",
        help="none (default): load everything at start, and nothing later; poll: follow changes in the repository; "
        "explicit: load what --load-model names, the rest when clients ask for it",
    )
    models.add_argument(
        "--load-model",
        metavar="NAME",
        action="append",
        default=[],
        help="with --model-control-mode=explicit: load this at start; may be repeated; * alone loads everything",
    )
    add_config_name(models)
    models.add_argument(
        "--repository-poll-secs",
        metavar="SECONDS",
        type=whole_number(1),
        default=15,
        help="with --model-control-mode=poll: how often the repository is looked at; default %(default)s",
    )
    models.add_argument(
        "--rate-limit",
        metavar="MODE",
        type=one_of("off", "execution_count"),
        default="off",
        help="off (default): instances run as soon as they are free; execution_count: they wait for their resources and"
        " their turn",
    )
    models.add_argument(
        "--rate-limit-resource",
        metavar="NAME:COUNT[:DEVICE]",
        type=resource,
        action="append",
        default=[],
        help="how much there is of a resource, on one device or on each; repeatable. Without any, the most that any"
        " instance asks for; with one, nothing of what is not given",
    )
    models.add_argument(
        "--cache-config",
        metavar="local,size=BYTES",
        type=local_cache,
        help="remember so many bytes of answers of the deployments whose configuration enables response_cache",
    )
    models.add_argument(
        "--python-execution",
        metavar="PLACE",
        type=one_of("process", "thread", "inline"),
        help="where Python models run: process, one for each instance; thread; or inline on the event loop, for "
        "trusted models; default process on Linux, thread elsewhere",
    )
    models.add_argument(
        "--backend-config",
        metavar="BACKEND,KEY=VALUE",
        type=backend_setting,
        action="append",
        default=[],
        help="a setting of a backend for all its models, where they do not say otherwise; onnxruntime has "
        f"{', '.join(ONNXRUNTIME_SETTINGS)}; repeatable",
    )
    add_gpu_arguments(parser)

    process = parser.add_argument_group("how it logs, traces and ends")
    process.add_argument(
        "--exit-timeout-secs",
        metavar="SECONDS",
        type=whole_number(0),
        default=30,
        help="how long requests may take to finish after SIGTERM; default %(default)s",
    )
    process.add_argument(
        "--log-verbose",
        metavar="LEVEL",
        type=whole_number(0),
        default=0,
        help="0 (default): what an operator needs; 1 and more: details",
    )
    process.add_argument(
        "--log-format",
        metavar="FORMAT",
        type=one_of("default", "ISO8601"),
        default="default",
        help="default or ISO8601: how a line tells the time",
    )
    for what in ("info", "warning", "error"):
        process.add_argument(
            f"--log-{what}", metavar="BOOL", type=boolean, default=True, help=f"log {what} lines; default true"
        )
    process.add_argument(
        "--log-file",
        metavar="PATH",
        default="",
        help="where the log goes, behind what is there; default: standard error",
    )
    process.add_argument(
        "--trace-config",
        metavar="SETTING",
        type=trace_setting,
        action="append",
        default=[],
        help="level=TIMESTAMPS, level=TENSORS, rate=N, count=N, mode=triton or mode=opentelemetry; triton,file=PATH, "
        "triton,log-frequency=N; opentelemetry,url=URL, opentelemetry,resource=KEY=VALUE; repeatable",
    )


def add_config_name(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """For every command that reads configurations."""
    parser.add_argument(
        "--model-config-name",
        metavar="NAME",
        type=file_stem,
        help="models that have a configs/NAME.pbtxt are configured by it in place of config.pbtxt",
    )


def contradiction(arguments: argparse.Namespace) -> str:
    """What is wrong with options of `flowserve run` that are right each by itself, "" for nothing."""
    if arguments.load_model and arguments.model_control_mode != "explicit":
        return "--load-model chooses what is loaded at start only with --model-control-mode=explicit"
    for group, count in Counter(group for one in arguments.http_restricted_api for group in one.groups).items():
        if count > 1:
            return f"--http-restricted-api: restricted api '{group}' can not be specified in multiple config groups"
    if (arguments.http_server_cert is None) != (arguments.http_server_key is None):
        return "--http-server-cert and --http-server-key go together"
    if arguments.http_root_cert and not arguments.http_server_cert:
        return "--http-root-cert says nothing without --http-server-cert"
    if flaw := trace_choice(arguments.trace_config).flaw:
        return f"--trace-config: {flaw}"
    if "*" in arguments.load_model and set(arguments.load_model) != {"*"}:
        return "Wildcard model name '*' must be the ONLY startup model if specified at all."
    return grpc_contradiction(arguments) or metrics_contradiction(arguments)


def _certificate(arguments: argparse.Namespace) -> tuple[Path, Path, Path | None] | None:
    if arguments.http_server_cert is None:
        return None
    return arguments.http_server_cert, arguments.http_server_key, arguments.http_root_cert


def _by_backend(settings: Sequence[tuple[str, str, str]]) -> dict[str, dict[str, str]]:
    """The last one wins where a setting is given twice."""
    by_backend: dict[str, dict[str, str]] = {}
    for backend, key, value in settings:
        by_backend.setdefault(backend, {})[key] = value
    return by_backend


def run_options(arguments: argparse.Namespace) -> RunOptions:
    """The parsed arguments of `flowserve run` as the rest of the program trusts them."""
    return RunOptions(
        repositories=tuple(arguments.repositories),
        http_address=arguments.http_address,
        http_port=arguments.http_port,
        http_max_input_size=arguments.http_max_input_size,
        http_certificate=_certificate(arguments),
        http_restrictions=tuple(arguments.http_restricted_api),
        http_header_forward_pattern=arguments.http_header_forward_pattern,
        metrics=metrics_options(arguments),
        grpc=grpc_choice(arguments),
        allow_client_shm=arguments.allow_client_shm,
        backend_settings=_by_backend(arguments.backend_config),
        exit_timeout_s=arguments.exit_timeout_secs,
        exit_on_error=arguments.exit_on_error,
        strict_readiness=arguments.strict_readiness,
        python_execution=arguments.python_execution,
        gpu=gpu_choice(arguments),
        model_control_mode=arguments.model_control_mode,
        model_config_name=arguments.model_config_name or "",
        load_models=tuple(dict.fromkeys(arguments.load_model)),
        repository_poll_s=arguments.repository_poll_secs,
        rate_limit=arguments.rate_limit == "execution_count",
        rate_limit_resources=tuple(arguments.rate_limit_resource),
        cache_bytes=arguments.cache_config,
        trace=tuple(arguments.trace_config),
        log=LogChoice(
            log_file=arguments.log_file,
            log_info=arguments.log_info,
            log_warning=arguments.log_warning,
            log_error=arguments.log_error,
            log_verbose_level=arguments.log_verbose,
            log_format=arguments.log_format,
        ),
    )
