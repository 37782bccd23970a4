"""The process of an instance on another machine, spoken to directly: who it serves, and what ends it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowserve.backends.base import ModelFiles
from flowserve.backends.python.pb_utils import context
from flowserve.backends.worker import messages
from flowserve.backends.worker.messages import encode_run, pack, unpack
from flowserve.config.types import InstanceGroup, ModelConfig, SourceMap
from flowserve.elsewhere.cluster import frames
from flowserve.elsewhere.cluster.actor import Actor
from flowserve.elsewhere.cluster.base import ActorJob, InstanceJob, versions
from flowserve.elsewhere.cluster.files import digest_of
from flowserve.elsewhere.cluster.link import ActorLink, greet_actor
from flowserve.elsewhere.cluster.pipes import pickled
from flowserve.errors import Unavailable
from flowserve.memory.pool import HOST
from flowserve.values import DType, TensorSpec
from tests.support.clusters import DOUBLE_CODE

SECRET = os.urandom(frames.SECRET_BYTES)
SPECS = TensorSpec("IN", DType.FP32, (-1,)), TensorSpec("OUT", DType.FP32, (-1,)), TensorSpec("PID", DType.INT32, (1,))


class Spoken:
    """The server's end of a connection, by messages."""

    def __init__(self, link: ActorLink) -> None:
        self.link = link
        self.heard_of = 0  # the instance of the last message

    def tell(self, kind: int, words: Sequence[int] = (), text: Any = None, instance: int = 0) -> None:
        self.link.send(instance, pack(kind, words, text))

    def hear(self) -> tuple[int, Sequence[int], Any, Any]:
        self.heard_of, message, block = self.link.read(HOST.take, self._silent)
        kind, words, text = unpack(message)
        return kind, words, json.loads(text) if text else None, block

    def open(self) -> None:
        self.tell(frames.HELLO, (), versions())
        kind, words, text, _ = self.hear()
        assert (kind, words[1:], text) == (messages.READY, (0,), None)

    def run(self, number: int, *values: float) -> None:
        data = np.array([values], np.float32)
        place = (frames.BLOCK, 0, data.nbytes, data.shape)
        message = encode_run(number, 0, 0, [1], [(0, 1)], (0, 0), [place])
        self.link.send(1, message, [data.tobytes()], data.nbytes)

    def _silent(self) -> None:
        self.silences = getattr(self, "silences", 0) + 1
        assert self.silences < 10


@pytest.fixture(autouse=True)
def process_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only model of an actor owns its process for good, which here is that of all tests."""
    for name in ("context", "owns_process"):
        monkeypatch.setattr(context._Active, name, getattr(context._Active, name))


@contextmanager
def actor(tmp_path: Path, code: str = DOUBLE_CODE) -> Iterator[tuple[Actor, threading.Thread, InstanceJob]]:
    """An actor of a model, on a thread of this process."""
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.py").write_text(code)
    files = ModelFiles(tmp_path, tmp_path / "m", 1)
    config = ModelConfig("m", "python", "", 8, SPECS[:1], SPECS[1:], SourceMap("m/config.pbtxt"))
    made = Actor(ActorJob("m_0", SECRET), "127.0.0.1")
    job = InstanceJob(1, "m_0", config, InstanceGroup("m"), files, digest_of(files), {})
    made.add(job)
    thread = threading.Thread(target=made.serve)
    thread.start()
    try:
        yield made, thread, job
    finally:
        thread.join(30)
        assert not thread.is_alive()


@contextmanager
def connected(made: Actor, secret: bytes = SECRET) -> Iterator[Spoken]:
    link = ActorLink(socket.create_connection(("127.0.0.1", made.port)))
    try:
        greet_actor(link, secret)
        yield Spoken(link)
    finally:
        link.discard()


def test_batches_run_in_order_and_the_actor_ends_with_the_connection(tmp_path: Path) -> None:
    with actor(tmp_path) as (made, thread, _):
        with connected(made) as server:
            server.open()
            for number in (7, 8, 9):
                server.run(number, -30.0, number)
            server.tell(frames.PING)
            heard = [server.hear() for _ in range(4)]
            assert heard[0][0] == frames.PONG, "while the first batch runs"
            assert [(kind, words[1]) for kind, words, _, _ in heard[1:]] == [(messages.DONE, n) for n in (7, 8, 9)]
            assert [block[:8].view(np.float32)[1] for *_, block in heard[1:]] == [14, 16, 18]
        thread.join(10)


def test_a_connection_that_does_not_know_the_secret_is_refused_and_the_next_one_is_served(tmp_path: Path) -> None:
    with actor(tmp_path) as (made, *_):
        with pytest.raises(Unavailable), connected(made, b"x" * 32):
            pass
        with socket.create_connection(("127.0.0.1", made.port)) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n".ljust(64))
            plain.recv(1000)
        with connected(made) as server:
            server.open()
            server.tell(messages.END)
            assert (server.hear()[0], server.heard_of) == (frames.CLOSED, 1)
            with pytest.raises(EOFError):
                server.hear()


def test_other_versions_are_refused_with_both(tmp_path: Path) -> None:
    with actor(tmp_path) as (made, *_), connected(made) as server:
        server.tell(frames.HELLO, (), ["9.9", "3.99", "7"])
        kind, _, (error, text), _ = server.hear()
        assert (kind, error) == (messages.BROKEN, "unavailable")
        assert "the server has flowserve, Python and numpy 9.9, 3.99, 7" in text
        assert ", ".join(versions()) in text


@pytest.mark.parametrize(
    "message",
    [
        pack(99, ()),
        pack(messages.RUN, (1, 2)),
        encode_run(1, 0, 0, [1], [(0,)], (0, 0), [(frames.BLOCK, 0, 4000, (1, 1000))]),
        encode_run(1, 0, 0, [1], [(0,)], (0, 0), [(frames.BLOCK, 0, 8, (3, 1))]),
        encode_run(1, 0, 0, [2], [(0,)], (0, 0), [(frames.BLOCK, 0, 8, (1, 2))]),
        encode_run(1, 0, 0, [1], [(5,)], (0, 0), [(frames.BLOCK, 0, 8, (1, 2))]),
        encode_run(1, 0, 0, [1], [(0,)], (0, 0), [None, None]),
        encode_run(1, 0, 2, [1], [(0,)], (0, 0), [(frames.BLOCK, 0, 8, (1, 2))]),
        pack(messages.ROUTE, (1, 2)),
        pack(messages.ROUTE, (1, 2, 1, 0, 9, 0)),
        pack(messages.CANCEL, ()),
        pack(messages.RUN, (1, 5, 0, 1, 1, 4, 0, 0, 1)),
        b"\x00" * 8,
    ],
)
def test_a_message_that_cannot_be_right_ends_the_actor(tmp_path: Path, message: bytes) -> None:
    with actor(tmp_path) as (made, *_), connected(made) as server:
        server.open()
        server.link.send(1, message, [bytes(8)], 8)
        with pytest.raises(EOFError):
            server.hear()


def test_an_error_of_the_model_fails_its_batch_and_the_next_one_runs(tmp_path: Path) -> None:
    with actor(tmp_path) as (made, *_), connected(made) as server:
        server.open()
        server.run(1, -2.0)
        kind, words, (_, text, traceback), _ = server.hear()
        assert (kind, words[1]) == (messages.FAILED, 1)
        assert "minus two" in text
        assert traceback.startswith("Traceback")
        server.run(2, -1.0)
        kind, _, told, block = server.hear()
        assert (kind, block) == (messages.DONE, None)
        assert "minus one" in told["0"][1]
        server.run(3, 1.0)
        assert server.hear()[0] == messages.DONE


def test_an_instance_that_was_given_up_before_its_job_came_is_not_opened(tmp_path: Path) -> None:
    with actor(tmp_path) as (made, _, job), connected(made) as server:
        server.open()
        server.tell(messages.END, instance=2)
        server.tell(frames.PING)
        assert server.hear()[0] == frames.PONG
        made.add(replace(job, number=2, name="m_1"))
        made.add(replace(job, number=3, name="m_2"))
        assert (server.hear()[0], server.heard_of) == (messages.READY, 3)
        server.tell(messages.END, instance=3)
        assert (server.hear()[0], server.heard_of) == (frames.CLOSED, 3)
        server.run(1, 4.0)
        assert (server.hear()[0], server.heard_of) == (messages.DONE, 1), "the other one goes on"
        server.tell(messages.RUN, instance=3)
        with pytest.raises(EOFError):
            server.hear()


@pytest.mark.slow
def test_a_process_whose_machine_ended_while_it_started_ends_in_silence() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "flowserve.elsewhere.cluster.actor"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=writes, stderr=subprocess.PIPE)
    os.close(writes)
    assert process.stdin is not None
    assert process.stderr is not None
    with process.stdin, process.stderr:
        process.stdin.write(pickled(ActorJob("m_0", SECRET)))
        process.stdin.close()  # with its output, by the end of the machine's process
        assert (process.stderr.read(), process.wait()) == (b"", 0)
