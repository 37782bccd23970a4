"""What `flowserve run` can be told about gRPC.

Decided here: names, defaults and limits of these options: tritonserver's, but for the address, which is this machine's
only; and that what is restricted over HTTP is so over gRPC too. What most of them do is grpcio's.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from flowserve.cli.option_values import boolean, one_of, pattern, restriction, whole_number
from flowserve.grpc.options import KEY_PREFIX, MESSAGE_BYTES_MAX, GrpcOptions
from flowserve.runtime.restriction import Restriction

DEFAULT_PORT: Final = 8001
# Each option that is handed on: grpcio's name for it, tritonserver's default, and what it says.
_CHANNEL: Final[Mapping[str, tuple[str, int, str]]] = {
    "--grpc-keepalive-time": ("grpc.keepalive_time_ms", 7_200_000, "milliseconds between pings to a silent client"),
    "--grpc-keepalive-timeout": ("grpc.keepalive_timeout_ms", 20_000, "milliseconds a ping may stay unanswered"),
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
_PERMIT_WITHOUT_CALLS: Final = "grpc.keepalive_permit_without_calls"
# grpcio chooses among what the client takes by such a level; every answer of the server is compressed so.
_COMPRESSION: Final = "grpc.default_compression_level"
_LEVELS: Final = ("none", "low", "medium", "high")
_NO_LIMIT: Final = frozenset({"grpc.max_connection_age_ms", "grpc.max_connection_age_grace_ms"})


@dataclass(frozen=True, slots=True)
class GrpcChoice:
    """`port` None: the usual one, where it can be had. `open_over_http`: groups that are restricted over gRPC only."""

    is_allowed: bool = True
    address: str = "127.0.0.1"
    port: int | None = None
    options: GrpcOptions = field(default_factory=GrpcOptions)
    open_over_http: tuple[str, ...] = ()


def add_grpc_arguments(parser: argparse.ArgumentParser) -> None:
    """The group of options."""
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
    group.add_argument(
        "--grpc-infer-response-compression-level",
        metavar="LEVEL",
        type=one_of(*_LEVELS),
        default="none",
        help="none (default), low, medium or high: how hard answers are compressed for clients that take it",
    )
    group.add_argument(
        "--grpc-keepalive-permit-without-calls",
        metavar="BOOL",
        type=boolean,
        default=False,
        help="pings also while no call is under way; default false",
    )
    for option, (_, default, text) in _CHANNEL.items():
        group.add_argument(
            option, metavar="N", type=whole_number(0, 2**31 - 1), default=default, help=f"{text}; default {default}"
        )
    _add_who_may_ask(group)


def _add_who_may_ask(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--grpc-use-ssl", metavar="BOOL", type=boolean, help="serve TLS; default false")
    group.add_argument(
        "--grpc-use-ssl-mutual",
        metavar="BOOL",
        type=boolean,
        default=False,
        help="serve TLS, and clients must have a certificate of --grpc-root-cert; default false",
    )
    group.add_argument("--grpc-server-cert", metavar="FILE", type=Path, help="the server's certificate (PEM)")
    group.add_argument("--grpc-server-key", metavar="FILE", type=Path, help="its key")
    group.add_argument("--grpc-root-cert", metavar="FILE", type=Path, help="the authority of clients' certificates")
    group.add_argument(
        "--grpc-restricted-protocol",
        metavar="GROUP,...:KEY=VALUE",
        type=restriction,
        action="append",
        default=[],
        help=f"these groups of calls only answer to the header {KEY_PREFIX}KEY; the groups are those of "
        "--http-restricted-api, whose restrictions hold here too; repeatable",
    )
    group.add_argument(
        "--grpc-header-forward-pattern",
        metavar="REGEX",
        type=pattern,
        help="headers of such names reach models as request parameters",
    )


def grpc_contradiction(arguments: argparse.Namespace) -> str:
    """What is wrong with options that are right each by itself, "" for nothing."""
    for group, count in Counter(group for one in arguments.grpc_restricted_protocol for group in one.groups).items():
        if count > 1:
            return f"--grpc-restricted-protocol: protocol '{group}' can not be specified in multiple config groups"
    files = (arguments.grpc_server_cert, arguments.grpc_server_key)
    if arguments.grpc_use_ssl_mutual or arguments.grpc_use_ssl:
        if None in files:
            return "--grpc-use-ssl needs --grpc-server-cert and --grpc-server-key"
        if arguments.grpc_use_ssl_mutual and not arguments.grpc_root_cert:
            return "--grpc-use-ssl-mutual needs --grpc-root-cert"
        if arguments.grpc_root_cert and not arguments.grpc_use_ssl_mutual:
            return "--grpc-root-cert says nothing without --grpc-use-ssl-mutual true: clients would not be asked"
    elif arguments.grpc_use_ssl is None and any((*files, arguments.grpc_root_cert)):
        return "certificates for gRPC say nothing without --grpc-use-ssl true"
    return ""


def grpc_choice(arguments: argparse.Namespace) -> GrpcChoice:
    """The parsed arguments, which do not contradict each other."""
    http, own = arguments.http_restricted_api, arguments.grpc_restricted_protocol
    options = GrpcOptions(
        max_message_bytes=arguments.grpc_max_message_size,
        channel=_channel(arguments),
        certificate=_certificate(arguments),
        restrictions=_restrictions(http, own),
        forward_pattern=arguments.grpc_header_forward_pattern,
    )
    closed = {group for one in http for group in one.groups}
    still_open = tuple(group for one in own for group in one.groups if group not in closed)
    return GrpcChoice(arguments.allow_grpc, arguments.grpc_address, arguments.grpc_port, options, still_open)


def _channel(arguments: argparse.Namespace) -> tuple[tuple[str, int], ...]:
    channel = [(_PERMIT_WITHOUT_CALLS, int(arguments.grpc_keepalive_permit_without_calls))]
    for option, (name, _, _) in _CHANNEL.items():
        value = getattr(arguments, option.removeprefix("--").replace("-", "_"))
        if value or name not in _NO_LIMIT:
            channel.append((name, value))
    level = _LEVELS.index(arguments.grpc_infer_response_compression_level)
    if level:
        channel.append((_COMPRESSION, level))
    return tuple(channel)


def _certificate(arguments: argparse.Namespace) -> tuple[Path, Path, Path | None] | None:
    if arguments.grpc_use_ssl or arguments.grpc_use_ssl_mutual:
        return arguments.grpc_server_cert, arguments.grpc_server_key, arguments.grpc_root_cert
    return None


def _restrictions(http: list[Restriction], own: list[Restriction]) -> tuple[Restriction, ...]:
    """What is restricted over HTTP and has no key of its own here has HTTP's: it must not stand open beside it."""
    closed = {group for one in own for group in one.groups}
    inherited = [replace(one, groups=tuple(group for group in one.groups if group not in closed)) for one in http]
    return (
        *(replace(one, name=KEY_PREFIX + one.name) for one in own),
        *(one for one in inherited if one.groups),
    )
