"""One process for several instances, so that they share a library with a loaded file, which is large.

Decides which process serves an instance whose `Remote` is `shared`: the first one is the host; each later one hands its
socket over to the host and stays alive without work, so that the server can still kill, reap and restart the process of
each instance. A seat of the host, which is a thread, then drives that instance as its own process would, with the same
messages and in the same time.

If the host ends, or its own instance is closed, every process that has handed over ends; the server starts them again
unless the model is unloaded, and the first of them is the next host. If a process that has handed over is killed, its
seat ends; if that does not happen soon, because it hangs in a run, the host ends.

The processes find each other by an abstract socket, whose name is derived from the secret in `shared`; each side checks
the user of the other, and the host also the secret. It does not know what an instance runs. Called by main.py.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

log = logging.getLogger("flowserve.child")

Serve = Callable[[int, bytes], None]

_TAKEN: Final = b"\1"  # sent to a process that has handed over, when the host has its instance
_REGULAR: Final = b"\0"  # ... and when its instance was closed
_LENGTHS: Final = struct.Struct("<2Q")  # of the secret and of the arguments, which follow
_ARGUMENTS_MAX: Final = 1 << 28
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid
_RETRY_S: Final = 0.01
_END_S_MAX: Final = 1.0  # limit for the seat of a process that has ended


def claim_host(secret: str) -> socket.socket | None:
    """The socket on which this process takes other instances, None if another process has it already."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_address(secret))
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return listener


def hand_over(socket_fd: int, arguments: bytes, secret: str) -> bool:
    """Let the host serve this process's instance, and wait until that is over. False if there is no host. Raises
    SystemExit if the host has ended meanwhile.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as host:
        is_taken = False
        with suppress(OSError):  # the host has just ended, or is about to listen
            host.connect(_address(secret))
            if _is_same_user(host):
                key = secret.encode()
                socket.send_fds(host, [_LENGTHS.pack(len(key), len(arguments))], [socket_fd])
                host.sendall(key + arguments)
                is_taken = host.recv(1) == _TAKEN
        if not is_taken:
            time.sleep(_RETRY_S)
            return False
        os.close(socket_fd)
        with suppress(OSError):
            if host.recv(1) == _REGULAR:
                return True
    log.error("the process that it shares has ended")
    raise SystemExit(1)


class Host:
    """Takes the instances of other processes. `serve` drives one of them, until the server ends it or has ended."""

    def __init__(self, listener: socket.socket, secret: str, serve: Serve) -> None:
        self._listener = listener
        self._secret = secret.encode()
        self._serve = serve
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, None)

    def start(self) -> None:
        """Accept other instances from now on. Ends with the process."""
        threading.Thread(target=self._run, name="flowserve seats", daemon=True).start()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._accept()
                else:  # the process has ended, or its seat
                    connection, seat = key.data
                    self._selector.unregister(connection)
                    seat.join(_END_S_MAX)
                    connection.close()
                    if seat.is_alive():
                        log.error("a process that shares this one has ended, and its instance is still running: ending")
                        os._exit(1)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # no descriptor is left, or the process has given up: it tries again
            time.sleep(_RETRY_S)
            return
        try:
            taken = self._take(connection)
            if taken is not None:
                connection.send(_TAKEN)
        except OSError:  # it has ended
            taken = None
        if taken is None:
            connection.close()
            return
        seat = threading.Thread(target=self._seat, args=(connection, *taken), name="flowserve seat", daemon=True)
        seat.start()
        self._selector.register(connection, selectors.EVENT_READ, (connection, seat))

    def _take(self, connection: socket.socket) -> tuple[int, bytes] | None:
        """The socket and the arguments of another process's instance; None if it is not one of these."""
        if not _is_same_user(connection):
            return None
        connection.settimeout(_END_S_MAX)
        head, fds, _, _ = socket.recv_fds(connection, _LENGTHS.size, 1)
        key = arguments = b""
        with suppress(struct.error, OSError, EOFError):
            key_length, length = _LENGTHS.unpack(head)
            if key_length == len(self._secret) and length <= _ARGUMENTS_MAX:
                key, arguments = _exactly(connection, key_length), _exactly(connection, length)
        connection.settimeout(None)
        if len(fds) == 1 and hmac.compare_digest(key, self._secret):
            return fds[0], arguments
        for fd in fds:
            os.close(fd)
        return None

    def _seat(self, connection: socket.socket, socket_fd: int, arguments: bytes) -> None:
        try:
            self._serve(socket_fd, arguments)
        except SystemExit:
            pass  # the error was reported: the process of the instance ends with it
        except Exception:
            log.exception("a shared instance failed")
        else:
            with suppress(OSError):
                connection.send(_REGULAR)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _address(secret: str) -> str:
    return f"\0flowserve-{hashlib.sha256(secret.encode()).hexdigest()[:40]}"


def _is_same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = connection.recv(min(count, 1 << 16))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
