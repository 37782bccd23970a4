"""`flowserve run --workers N`: opens the ports, and runs the parent of N servers.

Decides that ports are opened once, before any server is started; that the port of gRPC, on which every server listens
itself, is reserved; and what the parent prints. What the parent does is decided in replicas/. Caller: `main`.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

import trio

from flowserve.cli import logs
from flowserve.cli.options import http_certificate, log_choice
from flowserve.cli.serving.ports import UNIX, allow_many_descriptors, listen, open_grpc, open_metrics, url
from flowserve.cli.serving.shutdown import HANG_UP, SIGNALS
from flowserve.cli.standard_output import say
from flowserve.errors import FlowserveError, Invalid
from flowserve.grpc.options import GrpcOptions
from flowserve.http.server.server import close_listeners, open_listeners, shared_sockets
from flowserve.http.server.tls import tls_context
from flowserve.replicas.parent import Parent, Ports, private_folder
from flowserve.repository.layout import not_a_repository
from flowserve.version import __version__

_log = logging.getLogger("flowserve.cli")


def run_workers(arguments: argparse.Namespace) -> int:
    """Serve until a stop signal. Returns the exit status. `arguments` as `main` parses them, with their words."""
    try:
        logs.configure(log_choice(arguments))
    except OSError as error:
        return logs.failed(f"--log-file: '{arguments.log_file}' cannot be written: {error.strerror}")
    allow_many_descriptors()
    for repository in arguments.repositories:
        if not repository.is_dir():
            return logs.failed(not_a_repository(repository))
    return trio.run(_run, arguments)


async def _run(arguments: argparse.Namespace) -> int:
    with ExitStack() as stack:
        try:
            certificate = http_certificate(arguments)
            if certificate:
                tls_context(*certificate)  # its errors
            http = listen(arguments.http_address, arguments.http_port)
            stack.callback(close_listeners, http)
            metrics = open_metrics(arguments)
            stack.callback(close_listeners, metrics)
            grpc = _reserved_grpc(arguments, stack)
        except FlowserveError as error:
            return logs.failed(str(error))
        where = url(http[0], arguments.http_address, "https" if certificate else "http")
        _log.info("flowserve %s, %d workers, process %d", __version__, arguments.workers, os.getpid())
        parent = Parent(
            arguments.workers,
            arguments.words,
            Ports(http, metrics, grpc),
            arguments.exit_timeout_secs + arguments.drain_delay_secs,
            lambda: say(f"listening on {where}"),
            silence_s=arguments.worker_timeout_secs,
        )
        folder = stack.enter_context(private_folder())
        return await _run_until_stopped(parent, folder)


async def _run_until_stopped(parent: Parent, folder: Path) -> int:
    """The first stop signal lets requests finish, the second ends every process at once."""
    stop = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def asked(number: int) -> None:
        if not stop.is_set():
            stop.set()
        elif number != HANG_UP:  # a terminal that is closed may send two
            parent.end_all_at_once()

    def handle(number: int, _: FrameType | None) -> None:
        token.run_sync_soon(asked, number)

    before = {
        number: signal.signal(number, handle)
        for number in SIGNALS
        if number != HANG_UP or signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        return await parent.run(folder, stop)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reserved_grpc(arguments: argparse.Namespace, stack: ExitStack) -> tuple[str, int] | None:
    """The address and the port of gRPC, which is reserved, and printed; None if it is not served. Raises Invalid."""
    if arguments.allow_grpc and arguments.grpc_address.startswith(UNIX):
        raise Invalid("--grpc-address unix:PATH is for one server; with --workers, gRPC listens on a port")

    def reserve(address: str, port: int, _: GrpcOptions) -> tuple[str, int]:
        # Listen as a single server does, to detect a port in use, even if by another server with workers.
        listeners = open_listeners(address, port)
        taken: int = listeners[0].getsockname()[1]
        close_listeners(listeners)
        for sock in shared_sockets(address, taken):  # they do not listen
            stack.callback(sock.close)
        say(f"gRPC on {address}:{taken}")
        return address, taken

    return open_grpc(arguments, reserve)
