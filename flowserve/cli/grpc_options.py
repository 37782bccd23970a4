"""What `flowserve run` can be told about gRPC.

Decided here: names, defaults and limits of these options: tritonserver's, but for the address, which is this machine's
only. What they do is grpcio's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from flowserve.grpc.options import MESSAGE_BYTES_MAX, GrpcOptions

DEFAULT_PORT: Final = 8001
# Each option that is handed on: grpcio's name for it, tritonserver's default, and what it says.
_CHANNEL: Final[Mapping[str, tuple[str, int, str]]] = {
    "--grpc-keepalive-time": ("grpc.keepalive_time_ms", 7_200_000, "milliseconds between pings to a silent client"),
    "--grpc-keepalive-timeout": ("grpc.keepalive_timeout_ms", 20_000, "milliseconds a ping may stay unanswered"),
    "--grpc-keepalive-permit-without-calls": (
        "grpc.keepalive_permit_without_calls",
        0,
        "1: pings also while no call is under way",
    ),
    "--grpc-http2-max-pings-without-data": ("grpc.http2.max_pings_without_data", 2, "pings in a row; 0: any number"),
    "--grpc-http2-min-recv-ping-interval-without-data": (
        "grpc.http2.min_ping_interval_without_data_ms",
        300_000,
        "milliseconds between a client's pings, at least",
    ),
    "--grpc-http2-max-ping-strikes": ("grpc.http2.max_ping_strikes", 2, "pings that come too early; 0: any number"),
    "--grpc-max-connection-age": ("grpc.max_connection_age_ms", 0, "milliseconds a connection lives; 0: no limit"),
    "--grpc-max-connection-age-grace": (
        "grpc.max_connection_age_grace_ms",
        0,
        "milliseconds its calls have then; 0: no limit",
    ),
}
_NO_LIMIT: Final = frozenset({"grpc.max_connection_age_ms", "grpc.max_connection_age_grace_ms"})


@dataclass(frozen=True, slots=True)
class GrpcChoice:
    """`port` None: the usual one, where it can be had."""

    is_allowed: bool = True
    address: str = "127.0.0.1"
    port: int | None = None
    options: GrpcOptions = field(default_factory=GrpcOptions)


def add_grpc_arguments(
    parser: argparse.ArgumentParser,
    boolean: Callable[[str], bool],
    whole_number: Callable[[int, int], Callable[[str], int]],
) -> None:
    """The group of options, with the parsers of values that all options share."""
    group = parser.add_argument_group("gRPC")
    group.add_argument(
        "--allow-grpc", metavar="BOOL", type=boolean, default=True, help="serve gRPC beside HTTP; default true"
    )
    group.add_argument(
        "--grpc-address",
        metavar="ADDRESS",
        default="127.0.0.1",
        help="default %(default)s: this machine only; 0.0.0.0 for all; unix:PATH for a socket in the file system",
    )
    group.add_argument(
        "--grpc-port",
        metavar="PORT",
        type=whole_number(0, 65535),
        help=f"default {DEFAULT_PORT}, where it is free and grpcio is installed; 0 picks a free one and prints it",
    )
    group.add_argument(
        "--grpc-max-message-size",
        metavar="BYTES",
        type=whole_number(1, MESSAGE_BYTES_MAX),
        default=MESSAGE_BYTES_MAX,
        help="largest message of a client; default %(default)s",
    )
    for option, (_, default, text) in _CHANNEL.items():
        group.add_argument(
            option, metavar="N", type=whole_number(0, 2**31 - 1), default=default, help=f"{text}; default {default}"
        )


def grpc_choice(arguments: argparse.Namespace) -> GrpcChoice:
    """The parsed arguments. What is restricted over HTTP must not stand open beside it: there is no gRPC then."""
    channel = []
    for option, (name, _, _) in _CHANNEL.items():
        value = getattr(arguments, option.removeprefix("--").replace("-", "_"))
        if value or name not in _NO_LIMIT:
            channel.append((name, value))
    options = GrpcOptions(arguments.grpc_max_message_size, tuple(channel))
    is_allowed = arguments.allow_grpc and not arguments.http_restricted_api
    return GrpcChoice(is_allowed, arguments.grpc_address, arguments.grpc_port, options)
