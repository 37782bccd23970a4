"""What `flowserve run` can be told about its log.

Decided here: names and defaults of these options, which are tritonserver's. What can be changed later, and what a line
looks like, is decided elsewhere.
"""

from __future__ import annotations

import argparse

from flowserve.cli.option_values import boolean, one_of, whole_number
from flowserve.observe.log_settings import LogChoice


def add_log_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--log-verbose",
        metavar="LEVEL",
        type=whole_number(0),
        default=0,
        help="0 (default): what an operator needs; 1 and more: details",
    )
    group.add_argument(
        "--log-format",
        metavar="FORMAT",
        type=one_of("default", "ISO8601"),
        default="default",
        help="default or ISO8601: how a line tells the time",
    )
    for what in ("info", "warning", "error"):
        group.add_argument(
            f"--log-{what}", metavar="BOOL", type=boolean, default=True, help=f"log {what} lines; default true"
        )
    group.add_argument(
        "--log-file",
        metavar="PATH",
        default="",
        help="where the log goes, behind what is there; default: standard error",
    )


def log_choice(arguments: argparse.Namespace) -> LogChoice:
    return LogChoice(
        log_file=arguments.log_file,
        log_info=arguments.log_info,
        log_warning=arguments.log_warning,
        log_error=arguments.log_error,
        log_verbose_level=arguments.log_verbose,
        log_format=arguments.log_format,
    )
