"""Child processes: their initial state, the detection of their end, and that none remains. Real processes."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest
import trio

from flowserve.errors import Unavailable
from flowserve.runtime.clock import running_clock
from flowserve.runtime.processes.children import SUPPORTED, Child, Children

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not SUPPORTED, reason="child processes for models need Linux"),
]

WITHIN_S = 20.0  # a bound for a loaded machine, not the expected time

# The code of the children in these tests: run the given text.
ENTRY = """
import os
import signal
import subprocess
import sys
import threading
import time


def run(socket_fd, arguments):
    exec(arguments.decode(), {**globals(), "socket_fd": socket_fd})
"""


@pytest.fixture
async def children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Children]:
    (tmp_path / "runs_text.py").write_text(ENTRY)
    monkeypatch.syspath_prepend(str(tmp_path))
    async with trio.open_nursery() as nursery:
        made = Children(running_clock())
        await nursery.start(made.run)
        yield made
        await made.close()
        nursery.cancel_scope.cancel()


async def begin(children: Children, text: str, name: str = "m_0") -> Child:
    spawn = partial(children.spawn, name, "runs_text:run", textwrap.dedent(text).encode(), log_name="m")
    return await trio.to_thread.run_sync(spawn)


async def test_a_failing_exit_handler_does_not_stop_the_supervision_of_other_children(
    children: Children, caplog: pytest.LogCaptureFixture
) -> None:
    def slip(child: Child) -> None:
        raise RuntimeError("a slip")

    first, second = await begin(children, "time.sleep(100)"), await begin(children, "time.sleep(100)", "m_1")
    with first.socket, second.socket:
        first.on_end = slip
        first.kill()
        with trio.fail_after(WITHIN_S):
            while not first.ended:  # noqa: ASYNC110 - no event to wait for
                await trio.sleep(0.01)
        second.kill()
        assert "SIGKILL" in await end_of(second)
    assert "a slip" in caplog.text


async def end_of(child: Child) -> str:
    """Wait until its end is detected."""
    over = trio.Event()
    child.on_end = lambda _: over.set()
    if not child.ended:
        with trio.fail_after(WITHIN_S):
            await over.wait()
    child.socket.close()
    return child.ended


async def last_word(child: Child) -> bytes:
    """Wait for its end; returns its oldest unread message."""
    await until(lambda: bool(child.ended))
    with child.socket as sock:
        return sock.recv(10_000)


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(WITHIN_S):
        while not condition():  # noqa: ASYNC110 - another process has no event for this
            await trio.sleep(0.01)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_alive(pid: int) -> bool:
    """Whether a process with that number runs, and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


@pytest.mark.fault("R2")
async def test_the_end_of_a_child_is_described(children: Children) -> None:
    for text, how in {
        "os._exit(3)": "ended with exit status 3",
        "sys.exit(4)": "ended with exit status 4",
        "1 / 0": "ended with exit status 1",
        "pass": "ended with exit status 0",
        "import ctypes; ctypes.string_at(0)": "was killed by signal 11 (SIGSEGV)",
        "os.abort()": "was killed by signal 6 (SIGABRT)",
        "os.kill(os.getpid(), signal.SIGKILL)": "was killed by signal 9 (SIGKILL)",
        "os.kill(os.getpid(), signal.SIGRTMIN)": f"was killed by signal {int(signal.SIGRTMIN)}",
    }.items():
        child = await begin(children, text)
        assert (await end_of(child)).startswith(f"model 'm', instance 'm_0': its process {how}"), text


async def test_arguments_reach_a_child_and_its_messages_the_server(children: Children) -> None:
    child = await begin(children, f"os.write(socket_fd, b'{'x' * 100}'); time.sleep(60) #{'y' * 3_000_000}")
    await trio.lowlevel.wait_readable(child.socket)
    assert child.socket.recv(1000) == b"x" * 100
    child.kill()
    await end_of(child)


async def test_the_end_of_a_child_is_detected_while_a_grandchild_holds_its_socket(children: Children) -> None:
    child = await begin(
        children,
        """
        if os.fork() == 0:
            os.setsid()  # in another group: it is killed only after the end of its parent is known
            time.sleep(6)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    began = time.monotonic()
    assert "SIGKILL" in await end_of(child)
    assert time.monotonic() - began < 5.5


async def test_processes_started_by_a_child_end_with_it(children: Children, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    child = await begin(
        children,
        f"""
        helper = subprocess.Popen(["sleep", "600"])
        open({str(note)!r}, "w").write(str(helper.pid))
        os._exit(0)
        """,
    )
    await end_of(child)
    await until(lambda: not is_alive(int(note.read_text())))


# Starts `sleep 600` in three ways that leave the session of the child, and writes the process ids to `note`.
DAEMONS = """
import os, subprocess, sys, time
def start():
    # A session of its own; the same without any environment variable, and started by a process that stays.
    first = subprocess.Popen(["sleep", "600"], start_new_session=True).pid
    script = "echo $$; sleep 600 & echo $!; wait"
    shell = subprocess.Popen(["env", "-i", "setsid", "sh", "-c", script], stdout=subprocess.PIPE, text=True)
    pids = [first, int(shell.stdout.readline()), int(shell.stdout.readline())]
    # A daemon: forked twice, without exec, an orphan while its child lives.
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(writing, str(os.getpid()).encode())
            time.sleep(600)
        os._exit(0)
    pids.append(int(os.read(reading, 100)))
    os.wait()
    return pids
"""


async def daemons_of(children: Children, note: Path, name: str = "m_0") -> tuple[Child, list[int]]:
    """A child, and the living processes that it started in sessions of their own."""
    lines = [f"note = {str(note)!r}", "pids = start()", "open(note + '.new', 'w').write(repr(pids))"]
    lines += ["os.rename(note + '.new', note)", "time.sleep(600)"]
    child = await begin(children, DAEMONS + "\n".join(lines), name)
    await until(note.exists)
    pids = json.loads(note.read_text())  # noqa: ASYNC240
    assert len(pids) == 4
    assert all(map(is_alive, pids))
    return child, pids


@pytest.mark.fault("W9")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGALRM], ids=["killed", "ended"])
async def test_processes_in_sessions_of_their_own_end_with_the_child_that_started_them(
    children: Children, tmp_path: Path, number: signal.Signals
) -> None:
    child, pids = await daemons_of(children, tmp_path / "note")
    other, others = await daemons_of(children, tmp_path / "other", "m_1")
    child.kill(number)
    await end_of(child)
    await until(lambda: not any(map(is_alive, pids)))
    # The daemons of another child continue, and are reaped when they end.
    assert all(map(is_alive, others))
    daemon = others[-1]
    assert parent_of(daemon) == parent_of(other.pid)  # the forkserver, as it is an orphan
    os.kill(daemon, signal.SIGKILL)
    await until(lambda: not Path(f"/proc/{daemon}").exists())
    assert is_alive(other.pid)
    assert all(map(is_alive, others[:-1]))
    await children.close()
    assert not any(map(is_alive, others))
    other.socket.close()


async def test_a_process_that_a_child_forks_cannot_answer_in_its_place(children: Children) -> None:
    child = await begin(
        children,
        """
        pid = os.fork()
        if pid == 0:
            try:
                os.write(socket_fd, b"forged")
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        os.write(socket_fd, b"genuine")
        """,
    )
    assert await last_word(child) == b"genuine"


async def test_a_pool_of_processes_in_a_model_can_be_ended(children: Children) -> None:
    child = await begin(
        children,
        """
        import multiprocessing
        pool = multiprocessing.get_context("fork").Pool(2)
        assert pool.map(abs, [-1, 2]) == [1, 2]
        pool.terminate()
        pool.join()
        """,
    )
    assert (await end_of(child)).endswith("exit status 0")


async def test_a_process_that_a_child_forks_and_stops_at_once_ends(children: Children) -> None:
    """As `Pool.terminate` does with a process that has not begun to work."""
    child = await begin(
        children,
        """
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            pid = os.fork()
            if pid == 0:
                time.sleep(3)
                os._exit(0)
            os.kill(pid, number)
            _, status = os.waitpid(pid, 0)
            assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == number, number
        os.kill(os.getpid(), signal.SIGTERM)  # to the worker itself it means nothing, as before
        """,
    )
    assert (await end_of(child)).endswith("exit status 0")


async def test_signals_are_not_blocked_after_forks_that_handlers_of_a_model_interrupt(children: Children) -> None:
    child = await begin(
        children,
        """
        class Late(Exception):
            pass

        def fork_and_raise(*_):
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            os.waitpid(pid, 0)
            raise Late

        signal.signal(signal.SIGALRM, fork_and_raise)
        sys.unraisablehook = lambda _: None
        for n in range(400):
            pid = 0
            try:
                signal.setitimer(signal.ITIMER_REAL, 2e-5 + 1e-6 * (n % 300))
                pid = os.fork()
                if pid == 0:
                    os._exit(0)
                time.sleep(0.001)
            except Late:
                pass
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                if pid:
                    os.waitpid(pid, 0)
            assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()), n

        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        pid = os.fork()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        if pid == 0:
            os._exit(blocked != {signal.SIGTERM})
        assert os.waitpid(pid, 0)[1] == 0 and blocked == {signal.SIGTERM}, "those that the model blocks stay blocked"
        """,
    )
    assert (await end_of(child)).endswith("exit status 0")


@pytest.mark.fault("R6")
async def test_children_share_no_mutable_state(children: Children) -> None:
    """Working directory, environment, modules, descriptors and random numbers are each process's own."""
    spoiler = await begin(
        children,
        """
        import json, numpy
        os.chdir("/"); os.environ["SPOILT"] = "1"; sys.modules["json"] = None; numpy.spoilt = True
        os.closerange(0, 1000)
        time.sleep(600)
        """,
        "spoiler_0",
    )
    tell = """
        import json, random
        import numpy
        told = [os.getcwd(), os.environ.get("SPOILT"), hasattr(numpy, "spoilt"), os.listdir("/proc/self/fd")]
        told += [random.random(), numpy.random.rand(), os.environ.get("OPENBLAS_NUM_THREADS")]
        os.write(socket_fd, json.dumps(told).encode())
    """
    answers = []
    for number in range(2):
        child = await begin(children, tell, f"good_{number}")
        answers.append(json.loads(await last_word(child)))
    for cwd, spoilt, has_attribute, fds, *_ in answers:
        assert (cwd, spoilt, has_attribute) == (os.getcwd(), None, False)
        assert len(fds) <= 6  # the standard three, the socket, the one listdir opens, a urandom
    assert answers[0][4] != answers[1][4]
    assert answers[0][5] != answers[1][5]
    assert answers[0][6] == os.environ.get("OPENBLAS_NUM_THREADS")
    spoiler.kill()
    await end_of(spoiler)


async def test_a_child_has_one_thread_a_session_and_numpy_imported(children: Children) -> None:
    child = await begin(
        children,
        """
        found = [len(os.listdir("/proc/self/task")), "numpy" in sys.modules, os.getsid(0) == os.getpid()]
        os.write(socket_fd, repr(found).encode())
        """,
    )
    assert await last_word(child) == b"[1, True, True]"


async def test_a_stop_signal_to_the_process_group_leaves_children_to_the_server(children: Children) -> None:
    """As when systemd stops a service: every process gets SIGTERM, and the server still drains."""
    child = await begin(children, "os.write(socket_fd, b'1'); time.sleep(1); os.write(socket_fd, b'2')")
    await trio.lowlevel.wait_readable(child.socket)
    assert child.socket.recv(1) == b"1"
    forkserver = parent_of(child.pid)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(forkserver, number)
        os.kill(child.pid, number)
    assert await last_word(child) == b"2"
    assert child.ended.endswith("exit status 0")


@pytest.mark.fault("R6")
async def test_printed_output_is_logged_under_the_models_name(
    children: Children, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flowserve.model.m")
    text = """
        import logging
        print("to stdout")
        print("to stderr", file=sys.stderr)
        logging.getLogger("anything").warning("two\\nlines")
        os.system("echo from a shell")
        sys.stdout.write("never ended")
        sys.stdout.flush()
        os._exit(0)
    """
    await end_of(await begin(children, text))
    assert [(record.name, record.levelname, record.getMessage()) for record in caplog.records] == [
        ("flowserve.model.m", "INFO", "to stdout"),
        ("flowserve.model.m", "INFO", "to stderr"),
        ("flowserve.model.m", "WARNING", r"two\nlines"),
        ("flowserve.model.m", "INFO", "from a shell"),
        ("flowserve.model.m", "INFO", "never ended"),
    ]


async def test_each_traceback_of_a_child_is_one_log_record(
    children: Children, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flowserve.model.m")
    text = """
        import logging, threading, traceback
        def fail():
            raise ValueError("one\\ntwo")
        def work():
            raise KeyError("in a thread")
        try:
            fail()
        except ValueError:
            logging.exception("noticed")
        one = threading.Thread(target=work, name="worker")
        one.start()
        one.join()
        try:
            work()
        except KeyError:
            traceback.print_exc()
        time.sleep(600)
    """
    child = await begin(children, text)
    with trio.fail_after(30):
        # The last record is logged although no line follows it.
        while len(caplog.records) < 3:  # noqa: ASYNC110  # a log sets no event
            await trio.sleep(0.01)
    child.kill(why="seen enough")
    await end_of(child)
    records = [(record.levelname, record.getMessage().splitlines()) for record in caplog.records]
    assert [level for level, _ in records] == ["ERROR"] * 3
    (_, logged), (_, threads), (_, printed) = records
    assert (logged[0], logged[-2:]) == ("noticed", ["ValueError: one", "two"])
    assert (threads[0], threads[-1]) == ("Exception in thread worker:", "KeyError: 'in a thread'")
    assert (printed[0], printed[-1]) == ("Traceback (most recent call last):", "KeyError: 'in a thread'")


@pytest.mark.fault("R6")
async def test_a_crash_is_logged_with_its_location(children: Children, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "flowserve.model.m")
    text = """
        def unlucky():
            import ctypes
            ctypes.string_at(0)
        unlucky()
    """
    await end_of(await begin(children, text))
    assert "Segmentation fault" in caplog.text
    assert "in unlucky" in caplog.text


async def test_the_log_states_the_reason_of_a_kill_by_the_server(children: Children) -> None:
    child = await begin(children, "time.sleep(600)")
    child.kill(why="it was in the way")
    assert await end_of(child) == "model 'm', instance 'm_0': it was in the way"


async def test_children_of_a_killed_forkserver_end_and_the_next_child_has_a_new_one(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = await begin(children, "time.sleep(600)")
    forkserver = parent_of(child.pid)
    monkeypatch.setattr("flowserve.runtime.processes.children.REPORT_S_MAX", 10 * WITHIN_S)  # do not wait for a report
    os.kill(forkserver, signal.SIGKILL)
    assert "together with the process that had started it" in await end_of(child)
    while True:
        try:
            child = await begin(children, "time.sleep(600)")
            break
        except Unavailable:  # the old one has not ended yet
            await trio.sleep(0.01)
    child.kill()
    assert "SIGKILL" in await end_of(child)


async def test_a_forkserver_outlives_the_thread_that_started_it(children: Children) -> None:
    """A child's parent-death signal depends on the thread that forked, and worker threads may end at any time."""
    born: list[Child] = []

    def spawn() -> None:
        born.append(children.spawn("m_0", "runs_text:run", b"time.sleep(600)", log_name="m"))

    thread = threading.Thread(target=spawn)
    thread.start()
    await trio.to_thread.run_sync(thread.join)
    (first,) = born
    second = await begin(children, "pass")
    await end_of(second)
    assert is_alive(first.pid)
    first.kill()
    await end_of(first)


async def test_no_process_starts_after_the_end_of_the_server(children: Children) -> None:
    child = await begin(children, "time.sleep(600)")
    await children.close()
    assert child.ended.endswith("ended with the server")
    assert not is_alive(child.pid)
    child.socket.close()
    with pytest.raises(Unavailable, match="the server is ending"):
        await begin(children, "pass")


SERVER = '''
import sys
import trio
from flowserve.runtime.processes.children import Children
from flowserve.runtime.clock import running_clock

async def main():
    async with trio.open_nursery() as nursery:
        children = Children(running_clock())
        await nursery.start(children.run)
        text = f"""
subprocess.Popen(["sleep", "600"])
daemon = subprocess.Popen(["sleep", "600"], start_new_session=True)
open({sys.argv[1]!r}, "a").write(str(daemon.pid) + " ")
time.sleep(600)
"""
        for number in range(3):
            spawn = lambda: children.spawn(f"m_{number}", "runs_text:run", text.encode(), log_name="m")
            print((await trio.to_thread.run_sync(spawn)).pid, flush=True)
        print("ready", flush=True)
        await trio.sleep_forever()

trio.run(main)
'''


@pytest.mark.fault("X8")
@pytest.mark.fault("W9")
def test_children_and_their_descendants_end_with_a_killed_server(tmp_path: Path) -> None:
    (tmp_path / "runs_text.py").write_text(ENTRY)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    before = set(os.listdir("/dev/shm"))
    daemons = tmp_path / "daemons"
    command = [sys.executable, "-c", SERVER, str(daemons)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        pids = [int(line) for line in iter(server.stdout.readline, "ready\n")]
        assert len(pids) == 3
        sessions = set(pids)
        deadline = time.monotonic() + WITHIN_S
        # Each has its `sleep`, and a daemon in a session of its own.
        while len(_of_sessions(sessions)) < 6 or not daemons.exists() or len(daemons.read_text().split()) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        sessions.update(map(int, daemons.read_text().split()))
        server.kill()
    while left := _of_sessions(sessions):
        assert time.monotonic() < deadline + WITHIN_S, left
        time.sleep(0.01)
    assert set(os.listdir("/dev/shm")) <= before


def _of_sessions(sessions: set[int]) -> list[int]:
    """The living processes of these sessions."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                state, _, _, session = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if int(session) in sessions and state not in "ZX":
                found.append(int(entry))
    return found
