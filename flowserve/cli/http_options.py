"""What `flowserve run` can be told about HTTP.

Decided here: names, defaults and limits of these options, which are tritonserver's, but for the address, which is this
machine's only. What they do, http/ decides.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from flowserve.cli.option_values import boolean, pattern, restriction, whole_number

if TYPE_CHECKING:
    from flowserve.runtime.restriction import Restriction

MEBIBYTE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class HttpChoice:
    """`address` may be unix:PATH. `max_input_size` is in bytes. `certificate`: the server's, its key, and the authority
    of clients' certificates; None is plain HTTP. `header_forward_pattern` None: no header reaches a model.
    """

    address: str = "127.0.0.1"
    port: int = 8000
    max_input_size: int = 64 * MEBIBYTE
    certificate: tuple[Path, Path, Path | None] | None = None
    restrictions: tuple[Restriction, ...] = ()
    header_forward_pattern: re.Pattern[str] | None = None


def add_http_arguments(parser: argparse.ArgumentParser) -> None:
    """The group of options, and beside them what clients may do with this machine's memory."""
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


def http_contradiction(arguments: argparse.Namespace) -> str:
    """What is wrong with these options together, "" for nothing."""
    for group, count in Counter(group for one in arguments.http_restricted_api for group in one.groups).items():
        if count > 1:
            return f"--http-restricted-api: restricted api '{group}' can not be specified in multiple config groups"
    if (arguments.http_server_cert is None) != (arguments.http_server_key is None):
        return "--http-server-cert and --http-server-key go together"
    if arguments.http_root_cert and not arguments.http_server_cert:
        return "--http-root-cert says nothing without --http-server-cert"
    return ""


def http_choice(arguments: argparse.Namespace) -> HttpChoice:
    return HttpChoice(
        address=arguments.http_address,
        port=arguments.http_port,
        max_input_size=arguments.http_max_input_size,
        certificate=_certificate(arguments),
        restrictions=tuple(arguments.http_restricted_api),
        header_forward_pattern=arguments.http_header_forward_pattern,
    )


def _certificate(arguments: argparse.Namespace) -> tuple[Path, Path, Path | None] | None:
    if arguments.http_server_cert is None:
        return None
    return arguments.http_server_cert, arguments.http_server_key, arguments.http_root_cert
