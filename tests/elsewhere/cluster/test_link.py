"""Connections between machines: frames over sockets, with and without TLS; who is refused."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from flowserve.backends.worker.messages import Garbled
from flowserve.elsewhere.cluster.link import ActorLink, Tls, client_context, greet_actor, greet_server, server_context
from flowserve.errors import Unavailable
from flowserve.memory.pool import HOST

SECRET = b"k" * 32


@contextmanager
def linked(client_tls: Tls | None = None, server_tls: Tls | None = None) -> Iterator[tuple[ActorLink, ActorLink]]:
    """The server's end and the actor's, of a connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    ours = ActorLink(near, None if client_tls is None else client_context(client_tls))
    theirs = ActorLink(far, None if server_tls is None else server_context(server_tls), is_server=True)
    try:
        yield ours, theirs
    finally:
        ours.discard()
        theirs.discard()


def together(first: Callable[[], object], second: Callable[[], object]) -> list[object]:
    """Both, each on its thread: their results, or what they raised."""
    results: list[object] = [None, None]

    def run(i: int, work: Callable[[], object]) -> None:
        try:
            results[i] = work()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i, work)) for i, work in enumerate((first, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


def certificates(folder: Path, name: str) -> Tls:
    """A certificate that is its own authority."""
    key, certificate = folder / f"{name}.key", folder / f"{name}.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return str(certificate), str(key), str(certificate)


def silent() -> None:
    raise EOFError("silence")


@pytest.mark.parametrize("is_secure", [False, True])
def test_frames_arrive_whole_in_both_directions_at_once(tmp_path: Path, is_secure: bool) -> None:
    tls = certificates(tmp_path, "one") if is_secure else None
    sizes = [0, 1, 4096, 70_000, 3_000_000]
    with linked(tls, tls) as (ours, theirs):
        assert together(lambda: greet_actor(ours, SECRET), lambda: greet_server(theirs, SECRET)) == [None, True]

        def send(link: ActorLink) -> None:
            for size in sizes:
                data = np.frombuffer(os.urandom(size), np.uint8)
                message = bytes(8) + data.tobytes()[:100]
                link.send(size, message, [data[: size // 3].data, data[size // 3 :].data], size)

        def read(link: ActorLink) -> list[int]:
            found = []
            for _ in sizes:
                instance, message, block = link.read(HOST.take, silent)
                found.append(instance)
                assert instance == (0 if block is None else len(block))
                assert message[8:] == (b"" if block is None else block[:100].tobytes())
            return found

        sending = [threading.Thread(target=send, args=(link,)) for link in (ours, theirs)]
        for thread in sending:
            thread.start()
        assert together(lambda: read(ours), lambda: read(theirs)) == [sizes, sizes]
        for thread in sending:
            thread.join(10)


def test_neither_end_accepts_one_that_does_not_know_the_secret() -> None:
    with linked() as (ours, theirs):
        refused, accepted = together(lambda: greet_actor(ours, b"x" * 32), lambda: greet_server(theirs, SECRET))
        assert isinstance(refused, Unavailable)
        assert "does not know the secret" in str(refused)
    with linked() as (ours, theirs):
        assert together(lambda: theirs.close(), lambda: greet_server(theirs, SECRET))[1] is False
    with linked() as (ours, theirs):  # a client that proves nothing

        def guess() -> None:
            ours.exchange(bytes(32), 64)
            ours.exchange(bytes(32), 0)

        assert together(guess, lambda: greet_server(theirs, SECRET)) == [None, False]
        assert accepted is not True


def test_an_end_on_a_busy_machine_has_time_for_its_greeting() -> None:
    with linked() as (ours, theirs):

        def late() -> bool:
            time.sleep(1.3)
            return greet_server(theirs, SECRET)

        assert together(lambda: greet_actor(ours, SECRET), late) == [None, True]


def test_a_certificate_of_another_authority_is_refused(tmp_path: Path) -> None:
    one, other = certificates(tmp_path, "one"), certificates(tmp_path, "other")
    with linked(one, other) as (ours, theirs):
        refused, accepted = together(lambda: greet_actor(ours, SECRET), lambda: greet_server(theirs, SECRET))
        assert isinstance(refused, Unavailable)
        assert accepted is False


def test_files_of_tls_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="--cluster-tls /nowhere"):
        client_context(("/nowhere", "/nowhere", "/nowhere"))


def test_a_small_frame_is_sent_without_blocking_until_the_socket_is_full() -> None:
    with linked() as (ours, theirs):
        rest: list[Callable[[], None]] = []
        sent = 0
        while not rest and ours.try_send(7, bytes(60_000), (), 0, rest.append):
            sent += 1
        assert sent
        assert not ours.try_send(7, bytes(8), (), 0, rest.append), "the rest of the last one comes first"

        def read() -> int:
            return sum(1 for _ in range(sent) if len(theirs.read(HOST.take, silent)[1]) == 60_000)

        def send_rest() -> None:
            for one in rest:
                one()

        assert together(read, send_rest) == [sent, None]


def test_what_is_no_frame_and_an_end_are_told_apart() -> None:
    with linked() as (ours, theirs):
        ours.exchange(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", 0)
        with pytest.raises(Garbled):
            theirs.read(HOST.take, silent)
    with linked() as (ours, theirs):
        ours.exchange(b"fsf2", 0)
        ours.close()
        with pytest.raises(EOFError):
            theirs.read(HOST.take, silent)
    with linked() as (ours, theirs):
        with pytest.raises(EOFError, match="silence"):
            theirs.read(HOST.take, silent)
