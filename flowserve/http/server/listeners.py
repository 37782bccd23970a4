"""Listening sockets, for TCP and in the file system.

Decides their options, and that a socket which an earlier server left in the file system is replaced. Called by the
command line before models are loaded, so that a port in use is reported at once.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

_BACKLOG: Final = 2048


def open_listeners(host: str, port: int) -> list[socket.socket]:
    """Listening sockets for every address of `host`; `port` 0 picks one, the same for all. Raises OSError if one
    cannot be opened."""
    listeners: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            listener = socket.socket(family, kind, protocol)
            listeners.append(listener)
            listener.setblocking(False)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            chosen = port or listeners[0].getsockname()[1]
            listener.bind((address[0], chosen, *address[2:]))
            listener.listen(_BACKLOG)
    except OSError:
        close_listeners(listeners)
        raise
    return listeners


def open_unix_listener(path: str) -> socket.socket:
    """A listening socket at `path`, for this user and group only. A socket that an earlier server left there is
    removed; one with a server behind it, or a file, is not. Raises OSError.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.setblocking(False)
        _remove_stale(path)
        before = os.umask(0o117)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _remove_stale(path: str) -> None:
    """Remove a socket without a server behind it. Anything else stays, and binding reports it."""
    if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)


def close_listeners(sockets: Sequence[socket.socket]) -> None:
    """Close listening sockets, and remove those of the file system. Harmless when they are closed."""
    for sock in sockets:
        if sock.family == socket.AF_UNIX and sock.fileno() >= 0:
            with suppress(OSError):
                os.unlink(sock.getsockname())
        sock.close()
