"""What `flowserve run` can be told about its metrics.

Decided here: names, defaults and limits of these options, which are tritonserver's, and how they are written. What is
measured, and what it is called, observe/ decides.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from flowserve.cli.option_values import boolean, whole_number
from flowserve.observe.metrics_choice import EVERYTHING, MetricsChoice

QUANTILES: Final = (0.5, 0.9, 0.95, 0.99, 0.999)
_SWITCHES: Final = ("counter_latencies", "histogram_latencies", "summary_latencies")
_QUANTILES: Final = "summary_quantiles"
_SHARE: Final = re.compile(r"0(?:\.[0-9]{1,9})?|1(?:\.0{1,9})?", re.ASCII)

Setting = tuple[str, bool | tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class MetricsOptions:
    """`port` None: the HTTP port only. `address` None: where HTTP listens. `choice` None: there are no metrics."""

    choice: MetricsChoice | None = EVERYTHING
    port: int | None = None
    address: str | None = None


def add_metrics_arguments(parser: argparse.ArgumentParser) -> None:
    """The group of options."""
    group = parser.add_argument_group("metrics")
    group.add_argument(
        "--allow-metrics", metavar="BOOL", type=boolean, default=True, help="serve /metrics; default true"
    )
    group.add_argument(
        "--allow-cpu-metrics",
        metavar="BOOL",
        type=boolean,
        default=True,
        help="say how busy the machine is, too; default true",
    )
    group.add_argument(
        "--allow-gpu-metrics",
        metavar="BOOL",
        type=boolean,
        default=True,
        help="say what its GPUs do, where NVIDIA's driver tells; default true",
    )
    group.add_argument(
        "--metrics-port",
        metavar="PORT",
        type=whole_number(0, 65535),
        help="serve /metrics on a port of its own, too; 0 picks a free one and prints it",
    )
    group.add_argument("--metrics-address", metavar="ADDRESS", help="where that port is; default where HTTP listens")
    group.add_argument(
        "--metrics-interval-ms",
        metavar="MS",
        type=whole_number(1, 2**31 - 1),
        default=2000,
        help="over how long the machine's figures are taken, at least; default %(default)s",
    )
    group.add_argument(
        "--metrics-config",
        metavar="KEY=VALUE",
        type=setting,
        action="append",
        default=[],
        help="counter_latencies (default true), histogram_latencies (default true), summary_latencies (default false), "
        "summary_quantiles=0.5:0.05,0.9:0.01 (the shares; what follows them is taken and not needed); repeatable",
    )


def setting(text: str) -> Setting:
    """KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not equals or key not in (*_SWITCHES, _QUANTILES):
        known = ", ".join((*_SWITCHES, _QUANTILES))
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE with one of {known}, got {text!r}")
    return key, boolean(value) if key in _SWITCHES else _quantiles(value)


def _quantiles(text: str) -> tuple[float, ...]:
    found = []
    for one in text.split(","):
        share, colon, error = one.partition(":")
        if not _SHARE.fullmatch(share) or (colon and not _SHARE.fullmatch(error)):
            raise argparse.ArgumentTypeError(f"expected quantiles such as 0.5:0.05,0.99:0.001, got {text!r}")
        found.append(float(share))
    return tuple(found)


def metrics_contradiction(arguments: argparse.Namespace) -> str:
    """What is wrong with options that are right each by itself, "" for nothing."""
    if arguments.metrics_address is not None and arguments.metrics_port is None:
        return "--metrics-address says nothing without --metrics-port"
    if arguments.metrics_port is not None and not arguments.allow_metrics:
        return "--metrics-port has nothing to serve with --allow-metrics false"
    return ""


def metrics_options(arguments: argparse.Namespace) -> MetricsOptions:
    """The parsed arguments, which do not contradict each other."""
    if not arguments.allow_metrics:
        return MetricsOptions(None)
    return MetricsOptions(
        _choice(arguments.metrics_config, arguments), arguments.metrics_port, arguments.metrics_address
    )


def _choice(given: Sequence[Setting], arguments: argparse.Namespace) -> MetricsChoice:
    """Of a setting that is given twice the last one counts."""
    settings = dict(given)
    shares = settings.get(_QUANTILES, QUANTILES) if settings.get("summary_latencies") else ()
    return MetricsChoice(
        has_latency_counters=bool(settings.get("counter_latencies", True)),
        has_first_response=bool(settings.get("histogram_latencies", True)),
        quantiles=shares if isinstance(shares, tuple) else (),
        has_machine=arguments.allow_cpu_metrics,
        has_gpus=arguments.allow_gpu_metrics,
        interval_ms=arguments.metrics_interval_ms,
    )
