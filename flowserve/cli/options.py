"""What `flowserve run` can be told: its options and their limits.

Decided here: names (tritonserver's, where it has one), defaults (safe ones) and what each value may be, of the options
that have no module of their own (http_options.py and its like). What an option does is decided where it acts; this file
only turns words into a checked `RunOptions`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from flowserve.cli.gpu_options import GpuChoice, add_gpu_arguments, gpu_choice
from flowserve.cli.grpc_options import GrpcChoice, add_grpc_arguments, grpc_choice, grpc_contradiction
from flowserve.cli.http_options import HttpChoice, add_http_arguments, http_choice, http_contradiction
from flowserve.cli.log_options import add_log_arguments, log_choice
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
    resource,
    whole_number,
)
from flowserve.cli.refused_options import add_arguments_without_effect, settings_without_effect
from flowserve.cli.trace_options import TraceSetting, trace_choice, trace_setting
from flowserve.observe.log_settings import LogChoice

ControlMode = Literal["none", "poll", "explicit"]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the operator asked for. Sizes in bytes, times in seconds. A resource is its name, how many there are, and
    the device, None for each. `python_execution` None: what this system is best at.
    """

    repositories: tuple[Path, ...]
    http: HttpChoice = field(default_factory=HttpChoice)
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
    without_effect: tuple[str, ...] = ()


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything `flowserve run` takes. The repository is optional here, so that a misspelt option is named first."""
    parser.add_argument(
        "repositories",
        metavar="REPO",
        nargs="*",
        type=Path,
        help="the model repository, a folder of model folders; several are served as one",
    )

    add_http_arguments(parser)
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
    add_log_arguments(process)
    process.add_argument(
        "--trace-config",
        metavar="SETTING",
        type=trace_setting,
        action="append",
        default=[],
        help="level=TIMESTAMPS, level=TENSORS, rate=N, count=N, mode=triton or mode=opentelemetry; triton,file=PATH, "
        "triton,log-frequency=N; opentelemetry,url=URL, opentelemetry,resource=KEY=VALUE; repeatable",
    )
    add_arguments_without_effect(parser)


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
    if flaw := trace_choice(arguments.trace_config).flaw:
        return f"--trace-config: {flaw}"
    if "*" in arguments.load_model and set(arguments.load_model) != {"*"}:
        return "Wildcard model name '*' must be the ONLY startup model if specified at all."
    return http_contradiction(arguments) or grpc_contradiction(arguments) or metrics_contradiction(arguments)


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
        http=http_choice(arguments),
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
        log=log_choice(arguments),
        without_effect=(*arguments.without_effect, *settings_without_effect(arguments.backend_config)),
    )
