"""`flowserve run`: serves a repository on a port.

Decides the order of a server's life: the port is opened first; then models load, while health endpoints already answer
(live, not ready); then the table of deployments and a last line with the URL; then requests, until a signal; then the
drain. With `--workers N` this runs in each of N processes, whose parent has the ports (serving/workers.py); what is
different in such a server is decided in serving/role.py. Does not know how the steps work: `runtime`, `http` and `grpc`
do; nor which option sets what, how ports are opened and what signals mean (`serving/`).

Standard output has the progress, the table and the line `listening on URL`; standard error has the log and error
messages. Exit status: 0 after a stop signal if everything finished, 1 after a failure (reported on standard error).
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Final

import trio

from flowserve.cli import logs
from flowserve.cli.options import http_certificate, input_budget, log_choice, warning_of, without_effect
from flowserve.cli.serving.fronts import FrontEnds
from flowserve.cli.serving.ports import access_rules, allow_many_descriptors, url
from flowserve.cli.serving.progress import progress_for
from flowserve.cli.serving.role import Role, role_of
from flowserve.cli.serving.settings import (
    app_options,
    control_options,
    engine_options,
    has_rate_limit,
    trace_options,
)
from flowserve.cli.serving.shutdown import Shutdown, end_now
from flowserve.cli.wings import open_wings
from flowserve.config.types import OFF, Gpus
from flowserve.errors import FlowserveError
from flowserve.http.api.access import ANY
from flowserve.http.server.tls import tls_context
from flowserve.memory.devices import devices
from flowserve.memory.garbage import FrozenHeap
from flowserve.memory.heap import tune_malloc
from flowserve.observe.settings import LogSettings
from flowserve.repository.layout import not_a_repository
from flowserve.runtime.engine.engine import Engine, open_engine
from flowserve.runtime.loading.control import Control, open_control
from flowserve.temporary import remove_abandoned
from flowserve.version import __version__

_log = logging.getLogger("flowserve.cli")

_PAGES_LOAD: Final = (
    "with --http-cors-origins=* and --model-control-mode=explicit, a web page of any site, opened where this server can"
    " be reached, can load models and so run code here"
)
BUSY_NAMES_MAX: Final = 10  # busy instances named in the log line of the drain
# Share of the exit timeout that open sequences get at most; the rest is for their last requests and for closing.
SEQUENCES_SHARE: Final = 0.9
LAST_RESPONSES_S: Final = 0.1  # time for the responses to requests that still run then; TLS encrypts them meanwhile


def run(arguments: argparse.Namespace) -> int:
    """Serve until a stop signal. Returns the exit status. `arguments` as `options.run_arguments` returns them."""
    role = role_of(arguments)
    if not role.is_first:  # the first one reports the loads of all
        arguments.quiet = True
    try:
        log_settings = logs.configure(log_choice(arguments), role.worker)
    except OSError as error:
        return logs.failed(f"--log-file: '{arguments.log_file}' cannot be written: {error.strerror}")
    threading.excepthook = logs.log_thread_exception
    if role.is_first:
        warn(arguments)
    tune_malloc()
    # A worker thread that finished computing waits this long for a busy event loop to release the interpreter lock;
    # Python's default of 5 ms is longer than most requests. Measured on a CNN at concurrency 8: 1.1 times the
    # requests/s.
    sys.setswitchinterval(0.0005)
    allow_many_descriptors()
    # On its own thread: abandoned folders may hold gigabytes of small files.
    threading.Thread(target=remove_abandoned, name="sweep", daemon=True).start()
    try:
        return trio.run(_run, arguments, log_settings, role)
    except KeyboardInterrupt:  # before the signal handlers were installed
        return 1


def warn(arguments: argparse.Namespace) -> None:
    """Log options and settings that the operator may not have intended."""
    if ignored := without_effect(arguments):
        _log.warning("%s", warning_of(ignored))
    if arguments.model_control_mode == "explicit" and ANY in chain(*arguments.http_cors_origins):
        _log.warning("%s", _PAGES_LOAD)


async def _run(arguments: argparse.Namespace, log_settings: LogSettings, role: Role) -> int:
    for repository in arguments.repositories:
        if not repository.is_dir():
            return logs.failed(not_a_repository(repository))
    exit_timeout_s, delay_s = arguments.exit_timeout_secs, arguments.drain_delay_secs
    with (
        Shutdown(exit_timeout_s + delay_s, arguments.repositories, has_parent=role.worker is not None) as shutdown,
        FrozenHeap() as heap,
        ExitStack() as stack,
    ):
        trace = trace_options(arguments, role.worker)
        try:
            certificate = http_certificate(arguments)
            tls = tls_context(*certificate) if certificate else None
            ports = role.open_ports(arguments)
            trace.check()
            # On a thread, since Ray takes seconds.
            wings = await trio.to_thread.run_sync(lambda: stack.enter_context(open_wings(arguments)))
        except FlowserveError as error:
            return logs.failed(str(error))
        where = url(ports.http[0], arguments.http_address, "https" if tls else "http")
        _log.info("flowserve %s, process %d", __version__, os.getpid())
        if arguments.rate_limit_resource and not has_rate_limit(arguments):
            _log.warning("--rate-limit-resource has no effect without --rate-limit execution_count")
        access = access_rules(arguments, arguments.http_address, ports.http)
        app = app_options(arguments, access, log_settings, input_budget(arguments))
        async with (
            open_engine(
                engine_options(arguments, trace, _gpus(arguments), wings),
                exit_timeout_s=exit_timeout_s,
                deadline=lambda: shutdown.deadline,
                on_close=_must_be_closed,
            ) as engine,
            open_control(engine, arguments.repositories, control_options(arguments), heap.changed) as control,
        ):
            engine.group = role.group
            fronts = FrontEnds(arguments, ports, tls, engine, control, app, role.connections_changed)
            async with trio.open_nursery() as nursery:
                await fronts.start(nursery, role.own_ports(ports))
                await role.join(nursery, engine, control, fronts, app)
                status = await _load(arguments, engine, control, shutdown, heap, role, where)
                if status == 0:
                    await role.report_loaded()
                    await shutdown.asked.wait()
                    engine.deployments.is_leaving = True
                    await trio.sleep(delay_s)
                control.stop()
                await _drain(engine, fronts, shutdown, role)
                role.end()
    return status


def _gpus(arguments: argparse.Namespace) -> Gpus:
    if arguments.gpu == "off":
        return OFF
    found = devices()
    # The last value for a GPU wins, as on tritonserver.
    found.limit(arguments.pinned_memory_pool_byte_size, dict(arguments.cuda_memory_pool_byte_size))
    return found.gpus


async def _load(
    arguments: argparse.Namespace,
    engine: Engine,
    control: Control,
    shutdown: Shutdown,
    heap: FrozenHeap,
    role: Role,
    where: str,
) -> int:
    """Load all models and print the progress. Returns 0 if the server should continue (or was asked to stop)."""
    progress = progress_for(sys.stdout, is_quiet=arguments.quiet)
    try:
        with shutdown.until_asked() as loading, progress:
            failures = await control.start(progress.report)
    except FlowserveError as error:
        return logs.failed(str(error))
    if loading.cancelled_caught:
        return 0
    if failures:
        _report_failures(failures, len(engine.deployments.entries))
        if arguments.exit_on_error:
            return logs.failed("not serving; --exit-on-error false serves the models that did load")
    heap.settle()  # before the requests: it blocks
    progress.served(engine.deployments.entries, where)
    role.report_url(where)
    return 0


async def _drain(engine: Engine, fronts: FrontEnds, shutdown: Shutdown, role: Role) -> None:
    """Let requests finish until the deadline; if some do not, the process ends with status 1.

    The ports close only when no request is running: until then clients can end their sequences, and health checks see a
    server that is live and not ready, whereas a closed port would look like a crash.
    """
    deadline = shutdown.deadline if shutdown.asked.is_set() else trio.current_time()
    engine.refuse_new()
    role.report_stopping()
    if shutdown.asked.is_set():
        now = trio.current_time()
        _log.info("stopping: %s", _under_way(engine))
        await engine.sequences_over(now + (deadline - now) * SEQUENCES_SHARE)
    fronts.http.part()
    hung = await engine.drain(deadline)
    if hung:
        fronts.http.cut()
        await trio.sleep(LAST_RESPONSES_S)
        end_now(1, f"not finished within the exit timeout (--exit-timeout-secs): {', '.join(hung)}")
    await role.leave(fronts.adopt)
    fronts.drain(max(deadline - trio.current_time(), 0))


def _under_way(engine: Engine) -> str:
    """What the drain waits for. A model may also be busy with requests whose callers have left."""
    requests, busy = engine.scheduler.in_flight, engine.loaded.busy()
    sequences = sum(one.live for one in engine.scheduler.models.sequences)
    text = f"{requests} requests under way, {sequences} sequences open"
    if not busy:
        return text
    names = ", ".join([*busy[:BUSY_NAMES_MAX], *(["..."] if len(busy) > BUSY_NAMES_MAX else [])])
    return f"{text}; computing{'' if requests else ' for callers who have left'}: {names}"


def _must_be_closed(hung: Sequence[str]) -> None:
    if hung:
        end_now(1, f"not closed within the exit timeout (--exit-timeout-secs): {', '.join(hung)}")


def _report_failures(failures: Mapping[str, str], total: int) -> None:
    """A line with their number, and below it each model with its problems; as JSON, a line for each problem."""
    write = sys.stderr.write
    if logs.messages.are_json:
        for name, reason in failures.items():
            for problem in reason.splitlines():
                write(logs.messages.line(f"failed to load {name}: {problem}", model=name))
        write(logs.messages.line(f"{len(failures)} of {total} models failed to load"))
        return
    write(logs.messages.line(f"{len(failures)} of {total} models failed to load:"))
    for name, reason in failures.items():
        write("\n    ".join([f"  {logs.escape(name)}", *map(logs.escape, reason.splitlines())]) + "\n")
