"""The options of `flowserve run` as the records that the parts of a server take.

Decides which option becomes which field. Opens nothing and reads no machine: what has to be opened or found before
(ports, GPUs, wings) is given. Does not know the words of the command line (`options`). Caller: `run`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from flowserve.cli.options import (
    backend_settings,
    is_strict,
    metrics_choice,
    opentelemetry_settings,
    trace_api_max_bytes,
    trace_choice,
)
from flowserve.config.types import Gpus
from flowserve.http.api.access import AccessRules
from flowserve.http.api.infer import AppOptions
from flowserve.memory.client_memory import ClientMemory
from flowserve.observe.settings import LogSettings
from flowserve.runtime.budget import Budget
from flowserve.runtime.engine.options import EngineOptions
from flowserve.runtime.engine.wings import Wing
from flowserve.runtime.factory import PYTHON_EXECUTION
from flowserve.runtime.loading.control import ControlOptions
from flowserve.runtime.protocol import ElementLimits, Forwarding, hides_names
from flowserve.runtime.tracing.traces import TraceOptions
from flowserve.scheduling.rate_limit.limiter import Available


def trace_options(arguments: argparse.Namespace, worker: int | None) -> TraceOptions:
    """`worker`: the number of one of several servers, whose trace file is its own."""
    settings = arguments.trace_config
    choice = trace_choice(settings)
    if worker is not None and choice.trace_file:
        file = Path(choice.trace_file)
        choice = replace(choice, trace_file=str(file.with_name(f"{file.stem}-worker{worker}{file.suffix}")))
    return TraceOptions(choice, opentelemetry_settings(settings), trace_api_max_bytes(settings))


def engine_options(
    arguments: argparse.Namespace, trace: TraceOptions, gpus: Gpus, wings: tuple[Wing, ...]
) -> EngineOptions:
    """`gpus` and `wings`: what was found and opened on the options' behalf."""
    metrics = metrics_choice(arguments)
    restrictions = (*arguments.http_restricted_api, *arguments.grpc_restricted_protocol)
    resources = tuple(Available(*given) for given in arguments.rate_limit_resource)
    return EngineOptions(
        python_execution=arguments.python_execution or PYTHON_EXECUTION,
        gpus=gpus,
        strict_readiness=arguments.strict_readiness,
        rate_limit=resources if has_rate_limit(arguments) else None,
        cache_bytes=arguments.cache_config,
        backend_settings=backend_settings(arguments),
        trace=trace,
        model_config_name=arguments.model_config_name or "",
        server_name=arguments.id,
        answers_at_timeout=arguments.answer_at_timeout,
        strict_outputs=arguments.strict_outputs,
        strict_configs=is_strict(arguments),
        load_retries=arguments.model_load_retry_count,
        tells_names=not hides_names(restrictions),
        summaries=metrics is not None and bool(metrics.quantiles),
        wings=wings,
    )


def has_rate_limit(arguments: argparse.Namespace) -> bool:
    """Whether models wait for resources; without, --rate-limit-resource has no effect."""
    return bool(arguments.rate_limit == "execution_count")


def control_options(arguments: argparse.Namespace) -> ControlOptions:
    """How the repositories are followed, and what is loaded first."""
    names = tuple(dict.fromkeys(arguments.load_model))
    return ControlOptions(arguments.model_control_mode, names, arguments.repository_poll_secs, arguments.mirrors)


def app_options(arguments: argparse.Namespace, access: AccessRules, log: LogSettings, budget: Budget) -> AppOptions:
    """`access`: the rules for the open port; `budget`: shared by all front ends."""
    pattern = arguments.http_header_forward_pattern
    return AppOptions(
        max_body_bytes=arguments.http_max_input_size,
        elements=ElementLimits(arguments.max_bytes_elements, arguments.http_max_json_elements),
        client_memory=ClientMemory(is_allowed=arguments.allow_client_shm),
        restrictions=tuple(arguments.http_restricted_api),
        access=access,
        metrics=metrics_choice(arguments),
        forwarding=Forwarding(pattern, "--http-header-forward-pattern") if pattern else None,
        log=log,
        budget=budget,
    )
