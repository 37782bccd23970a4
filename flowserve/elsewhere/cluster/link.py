"""One end of a connection between the server and an actor on another machine.

Decides how frames are written and read over TCP, with or without TLS: one thread reads, any thread sends. A frame's
tensors are sent without a copy, and its block is read into memory that the reader provides. Decides how the two ends
authenticate each other (`greet_actor`, `greet_server`, with the proofs of `frames`), and that a second without a byte
is reported to the reader, which decides when the other end is lost: it counts such seconds, and reads no clock.

TLS encrypts in memory under a lock, because a reading and a writing thread may not use one TLS object at once.

Does not know what the messages mean. Callers: `actor`, and the worker in runtime/.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, count
from typing import Any, Final

from flowserve.elsewhere.cluster.frames import (
    GREETING_BYTES,
    HEAD,
    PROOF_BYTES,
    Buffer,
    decode_head,
    encode_head,
    is_proof,
    proof,
)
from flowserve.errors import Unavailable
from flowserve.values import Array

SILENCE_S: Final = 1.0  # `on_silence` is called after this time without a byte
GREETING_SILENCES_MAX: Final = 5  # seconds, for each step of the greeting: the other machine may be busy
_VECTOR_MAX: Final = 512  # buffers of one system call, below every system's limit
_TLS_BYTES: Final = 1 << 18
Tls = tuple[str, str, str]  # files: certificate, key, and the authority of the other end's certificate

Take = Callable[[int], Any]  # returns a writable uint8 array of this many bytes
Send = Callable[[], None]  # blocks; raises OSError or EOFError when the connection has ended


class ActorLink:
    """A connected socket. `read` is called on one thread, everything else on any."""

    def __init__(self, sock: socket.socket, tls: ssl.SSLContext | None = None, *, is_server: bool = False) -> None:
        """`is_server`: this end accepted the connection, and is the server of TLS."""
        self._socket = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        self._tls: _Tls | None = None if tls is None else _Tls(tls, is_server=is_server)
        self._sending = threading.Lock()
        self._head = bytearray(HEAD.size)
        self.is_closed = False
        self.sent = 0  # bytes that the other end has taken; it may read slowly

    # ------------------------------------------------------------------ sending

    def send(self, instance: int, message: bytes, buffers: Sequence[Buffer] = (), nbytes: int = 0) -> None:
        """Send a frame whose block consists of these buffers, `nbytes` in total. Blocks. Raises OSError when the
        connection has ended.
        """
        head = encode_head(instance, len(message), nbytes)
        with self._sending:
            self._send_all([head + message, *buffers])

    def try_send(
        self, instance: int, message: bytes, buffers: Sequence[Buffer], nbytes: int, later: Callable[[Send], object]
    ) -> bool:
        """Send a small frame without blocking. False, and nothing is sent, if that is not possible now. If only a part
        is sent, `later` is called with a function that sends the rest, to be called on a thread that may block.
        """
        if self._tls is not None or not self._sending.acquire(blocking=False):
            return False
        rest = b""
        try:
            data = b"".join([encode_head(instance, len(message), nbytes), message, *map(bytes, buffers)])
            rest = data[self._socket.send(data) :]
            self.sent += 1
        except BlockingIOError:
            return False
        finally:
            if rest:
                later(partial(self._send_rest, rest))
            else:
                self._sending.release()
        return True

    def _send_rest(self, rest: bytes) -> None:
        try:
            self._send_plain([rest])
        finally:
            self._sending.release()

    def _send_all(self, buffers: Sequence[Buffer]) -> None:
        if self._tls is not None:
            for data in self._tls.encrypted(buffers):
                self._send_plain([data])
        else:
            self._send_plain(buffers)

    def _send_plain(self, buffers: Sequence[Buffer]) -> None:
        views = [memoryview(one).cast("B") for one in buffers if len(one)]
        while views:
            try:
                done = self._socket.sendmsg(views[:_VECTOR_MAX])
            except BlockingIOError:
                self._wait(select.POLLOUT)
                continue
            self.sent += 1
            while views and done >= len(views[0]):
                done -= len(views.pop(0))
            if done:
                views[0] = views[0][done:]

    # ------------------------------------------------------------------ reading

    def read(self, take: Take, on_silence: Callable[[], None]) -> tuple[int, bytes, Array | None]:
        """The next frame: its instance, its message, and its block, None without one. Blocks. `take` provides the
        block's memory. Raises EOFError at the end, Garbled, and what `on_silence` raises.
        """
        self._fill(memoryview(self._head), on_silence)
        instance, message_bytes, nbytes = decode_head(self._head)
        message = bytearray(message_bytes)
        self._fill(memoryview(message), on_silence)
        if not nbytes:
            return instance, bytes(message), None
        block: Array = take(nbytes)
        self._fill(block.data, on_silence)
        return instance, bytes(message), block

    def _fill(self, view: memoryview, on_silence: Callable[[], None]) -> None:
        while len(view):
            done = self._receive(view)
            if done > 0:
                view = view[done:]
            elif done == 0:
                raise EOFError("the connection was closed")
            elif not self._wait(select.POLLIN):
                on_silence()

    def _receive(self, view: memoryview) -> int:
        """The number of bytes read, 0 at the end, -1 if there are none now."""
        try:
            if self._tls is None:
                return self._socket.recv_into(view)
            return self._tls.decrypted_into(view, self._socket)
        except BlockingIOError:
            return -1
        except OSError as error:
            raise EOFError(f"the connection was lost: {error.strerror or error}") from None

    def _wait(self, event: int) -> bool:
        """Wait for the socket, at most `SILENCE_S`. Raises EOFError once this end has closed it."""
        if self.is_closed:
            raise EOFError("the connection was closed here")
        poll = select.poll()
        poll.register(self._socket, event)
        return bool(poll.poll(SILENCE_S * 1000))

    # ------------------------------------------------------------------ greeting

    def handshake(self) -> None:
        """The handshake of TLS, on both ends, before the greeting. Raises Unavailable."""
        if self._tls is None:
            return
        try:
            while (data := self._tls.handshake()) is not None:
                if data:
                    self._send_plain([data])
                if self._tls.is_open:
                    return
                self._tls.feed(self._socket, self._wait_for_greeting)
        except (ssl.SSLError, OSError, EOFError) as error:
            raise Unavailable(f"TLS: {error}") from None

    def exchange(self, data: bytes, expected: int) -> bytes:
        """Send some bytes of a greeting and read `expected` bytes. Raises EOFError if they do not arrive in time."""
        self._send_all([data])
        answer = bytearray(expected)
        if expected:
            self._fill(memoryview(answer), _patience())
        return bytes(answer)

    def _wait_for_greeting(self) -> None:
        on_silence = _patience()
        while not self._wait(select.POLLIN):
            on_silence()

    def close(self) -> None:
        """End the connection, also for a thread that reads or sends."""
        self.is_closed = True
        with suppress(OSError):  # if it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def disown(self) -> None:
        """In a process that was forked: close this copy, so that the other end notices when the actor ends."""
        os.close(self._socket.detach())

    def discard(self) -> None:
        """Close the descriptor. The link is not used again."""
        self.close()
        self._socket.close()


def _patience() -> Callable[[], None]:
    """The `on_silence` of one step of the greeting. Raises EOFError after the last allowed second."""
    silences = count(1)

    def on_silence() -> None:
        if next(silences) >= GREETING_SILENCES_MAX:
            raise EOFError("the other end is silent")

    return on_silence


def greet_actor(link: ActorLink, secret: bytes) -> None:
    """The server's part of the greeting. Raises Unavailable if the other end does not know the secret."""
    greeting = os.urandom(GREETING_BYTES)
    try:
        link.handshake()
        answer = link.exchange(greeting, GREETING_BYTES + PROOF_BYTES)
        theirs, code = answer[:GREETING_BYTES], answer[GREETING_BYTES:]
        if not is_proof(code, secret, b"actor", greeting, theirs):
            raise Unavailable("the other end is not the instance that was started: it does not know the secret")
        link.exchange(proof(secret, b"server", greeting, theirs), 0)
    except (EOFError, OSError) as error:
        raise Unavailable(f"the connection failed while it was opened: {error}") from None


def greet_server(link: ActorLink, secret: bytes) -> bool:
    """The actor's part. False if the other end does not know the secret, or takes too long."""
    ours = os.urandom(GREETING_BYTES)
    try:
        link.handshake()
        greeting = link.exchange(b"", GREETING_BYTES)
        code = link.exchange(ours + proof(secret, b"actor", greeting, ours), PROOF_BYTES)
    except (EOFError, OSError, Unavailable):
        return False
    return is_proof(code, secret, b"server", greeting, ours)


def client_context(tls: Tls) -> ssl.SSLContext:
    """TLS of the server's end: the actor's certificate must be signed by the authority. Names are not compared, because
    actors have addresses only, and the secret identifies the actor. Raises Unavailable for files that cannot be used.
    """
    return _context(tls, ssl.PROTOCOL_TLS_CLIENT)


def server_context(tls: Tls) -> ssl.SSLContext:
    """TLS of the actor's end: the server's certificate must be signed by the authority."""
    return _context(tls, ssl.PROTOCOL_TLS_SERVER)


def _context(tls: Tls, side: int) -> ssl.SSLContext:
    certificate, key, authority = tls
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(certificate, key)
        context.load_verify_locations(authority)
    except (OSError, ssl.SSLError) as error:
        raise Unavailable(f"--cluster-tls {certificate},{key},{authority}: {error}") from None
    return context


class _Tls:
    """A TLS object in memory."""

    def __init__(self, context: ssl.SSLContext, *, is_server: bool) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        self._lock = threading.Lock()
        self._buffer = bytearray(_TLS_BYTES)
        self.is_open = False

    def handshake(self) -> bytes | None:
        """One step of the handshake; returns the bytes to send."""
        try:
            self._object.do_handshake()
            self.is_open = True
        except ssl.SSLWantReadError:
            pass
        return self._outgoing.read()

    def feed(self, sock: socket.socket, wait: Callable[[], None]) -> None:
        """Read the other end's bytes of the handshake."""
        wait()
        data = sock.recv(_TLS_BYTES)
        if not data:
            raise EOFError("the connection was closed")
        self._incoming.write(data)

    def encrypted(self, buffers: Sequence[Buffer]) -> chain[bytes]:
        """The encrypted buffers, in pieces."""
        return chain.from_iterable(map(self._pieces, buffers))

    def _pieces(self, buffer: Buffer) -> Sequence[bytes]:
        view = memoryview(buffer).cast("B")
        pieces = []
        for start in range(0, len(view), _TLS_BYTES):
            with self._lock:
                self._object.write(view[start : start + _TLS_BYTES])
                pieces.append(self._outgoing.read())
        return pieces

    def decrypted_into(self, view: memoryview, sock: socket.socket) -> int:
        """As `recv_into` of the socket."""
        while True:
            with self._lock:
                try:
                    done: int = self._object.read(len(view), view)  # type: ignore[assignment]  # with a buffer
                    return done
                except ssl.SSLWantReadError:
                    pass
                except ssl.SSLZeroReturnError:
                    return 0
            done = sock.recv_into(self._buffer)
            if not done:
                return 0
            with self._lock:
                self._incoming.write(memoryview(self._buffer)[:done])
