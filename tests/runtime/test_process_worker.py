"""Models in worker processes behind a real engine: responses, batches that stay whole without copies, memory that is
freed, and faults that concern one batch or one process.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio

from flowserve.backends import registry
from flowserve.backends.worker import messages
from flowserve.backends.worker.messages import encode_run, pack
from flowserve.config.types import InstanceGroup
from flowserve.errors import FlowserveError, InstanceDied, Internal, Invalid, ModelFailed, Overloaded
from flowserve.graph.types import GRAPH, Edge, Graph, ModelKey, Node
from flowserve.runtime.factory import PROCESS, worker_maker
from flowserve.runtime.processes.children import SUPPORTED
from flowserve.runtime.remote.shm import ProcessPort
from flowserve.values import DType, Request
from tests.support.backends import config_of, spec
from tests.support.engine import add_chain
from tests.support.processes import MODEL, OUT, ServedInProcesses, no_more_descriptors, row

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")


@pytest.mark.parametrize("is_routed", [True, False], ids=["route", "no route"])
async def test_a_batch_of_sixteen_stays_whole_through_a_chain_of_processes_without_copies(
    served: ServedInProcesses, is_routed: bool
) -> None:
    for name, what in (("twice", "given * 2"), ("plus", "given + 1"), ("minus", "given - 3")):
        await served.add(name, OUT.format(what))
    add_chain(served.engine, "chain", ["twice", "plus", "minus"])
    if not is_routed:
        served.leave_out_routes()
    for _ in range(3):
        answers = await served.ask_all("chain", [row(number) for number in range(16)])
        assert [answer.tolist() for answer in answers if isinstance(answer, np.ndarray)] == [
            row(number * 2 - 2).tolist() for number in range(16)
        ]
    nbytes = 16 * 64 * 4
    assert [list(one.copied) for one in served.results["twice"]] == [[nbytes]] * 3, "requests are where they arrived"
    for name in ("plus", "minus"):
        assert [sum(one.copied) for one in served.results[name]] == [0] * 3
        assert [list(one.placed) for one in served.results[name]] == [[nbytes]] * 3
    del answers
    served.results.clear()
    assert served.lent_bytes() == 0


async def test_two_readers_of_one_output_may_both_write_into_it(served: ServedInProcesses) -> None:
    scribble = "        given *= 10\n" + OUT.format("given")
    await served.add("source", OUT.format("given + 1"))
    for name in ("left", "right"):
        await served.add(name, scribble)
    parts = [served.engine.deployments.find(name) for name in ("source", "left", "right")]
    nodes = tuple(
        Node(i, p.name, ModelKey(p.name, 1), p.graph.inputs, p.graph.outputs, 16) for i, p in enumerate(parts)
    )
    inputs = parts[0].graph.inputs
    outputs = tuple(spec(name, (64,)) for name in ("SOURCE", "LEFT", "RIGHT"))
    edges = [Edge("IN", GRAPH, 0, 0, 0), Edge("s", 0, 0, 1, 0), Edge("s", 0, 0, 2, 0)]
    edges += [Edge(f"o{i}", i, 0, GRAPH, i) for i in range(3)]
    config = config_of("", name="fork", inputs=inputs, outputs=outputs, max_batch_size=16)
    served.engine.deployments.announce(
        config, Graph("fork", 1, inputs, outputs, 16, nodes, tuple(edges), is_ensemble=True)
    )
    given = row(4)
    response = await served.engine.infer(served.engine.deployments.find("fork"), Request({"IN": given}))
    assert {name: array[0, 0] for name, array in response.outputs.items()} == {"SOURCE": 5, "LEFT": 50, "RIGHT": 50}
    assert given[0, 0] == 4
    assert [list(one.copied) for name in ("left", "right") for one in served.results[name]] == [[0], [0]]


async def test_an_input_kept_by_a_model_is_not_overwritten(served: ServedInProcesses) -> None:
    body = """
        self.kept.append(given)
        if len(self.kept) > 3:
            del self.kept[:2]
        sums = [float(array[0, 0]) for array in self.kept]
        given = given * 0
        given[:, :4] = sums + [0] * (4 - len(sums))
""" + OUT.format("given")
    worker = await served.add("keeps", body, width=2000)
    said = [(await served.ask("keeps", row(number, 2000))).tolist()[0][:4] for number in range(1, 8)]
    assert said[2] == [1, 2, 3, 0]
    assert said[3] == [3, 4, 0, 0]
    assert said[6] == [5, 6, 7, 0], "the kept input is unchanged after seven more batches"
    channel = worker.port.channel
    assert channel is not None
    with trio.fail_after(5):
        while len(channel._held) > 3:  # noqa: ASYNC110 - released by a message of the process
            await trio.sleep(0.001)
    assert channel._held
    assert served.lent_bytes() == len(channel._held) * 8192


async def test_an_input_released_by_a_thread_of_an_idle_model_is_returned(served: ServedInProcesses) -> None:
    body = """
        threading.Timer(0.05, self.kept.clear).start()
        self.kept.append(given)
""" + OUT.format("given + 1")
    worker = await served.add("later", body, width=2000)
    await served.ask("later", row(1, 2000))
    channel = worker.port.channel
    assert channel is not None
    assert channel._held
    with trio.fail_after(5):
        while channel._held:  # noqa: ASYNC110
            await trio.sleep(0.001)
    assert served.lent_bytes() == 0


async def test_a_model_that_responds_after_execute_uses_its_list_and_the_time_is_counted(
    served: ServedInProcesses,
) -> None:
    body = """
        return pb_utils.InferenceResponse([pb_utils.Tensor('OUT', given * 2)])

    def execute(self, requests):
        senders = [request.get_response_sender() for request in requests]
        threading.Timer(0.05, self.later, (requests, senders)).start()

    def later(self, requests, senders):
        for request, sender in zip(requests, senders):
            sender.send(self.answer(request, request.inputs()[0].as_numpy()), 1)
"""
    await served.add("later", body)
    assert (await served.ask("later", row(3))).tolist() == row(6).tolist()
    answers = await served.ask_all("later", [row(1), row(2)])
    assert [answer.tolist() for answer in answers if isinstance(answer, np.ndarray)] == [
        row(2).tolist(),
        row(4).tolist(),
    ]
    for batch in served.results["later"]:
        assert batch.computed_ns - batch.gathered_ns >= 50_000_000, "until its answers are there it computes"


async def test_a_model_that_removes_requests_from_its_list_gets_a_count_mismatch_error(
    served: ServedInProcesses,
) -> None:
    body = """
        return pb_utils.InferenceResponse([pb_utils.Tensor('OUT', given)])

    def execute(self, requests):
        return [self.answer(one, one.inputs()[0].as_numpy()) for one in iter(lambda: requests and requests.pop(), [])]
"""
    await served.add("takes", body)
    with pytest.raises(ModelFailed, match=r"InferenceRequest\(s\) size is:0, and InferenceResponse\(s\) size is:1"):
        await served.ask("takes", row(1))


async def test_a_module_imported_from_the_model_folder_is_loaded_once(served: ServedInProcesses) -> None:
    """Imported inside of execute, by a thread, and by unpickling: one module, whose state is kept."""
    served.repository.write("lazy", "1/helper.py", "class Counted:\n    runs = 0\n")
    body = """
        import concurrent.futures, helper, importlib, pickle
        helper.Counted.runs += 1
        assert pickle.loads(pickle.dumps(self.kept)) == self.kept
        self.kept = [helper.Counted]
        with concurrent.futures.ThreadPoolExecutor() as threads:
            found = threads.submit(importlib.import_module, "helper").result()
        assert found is helper
""" + OUT.format("given * 0 + helper.Counted.runs")
    await served.add("lazy", body, width=1)
    assert [(await served.ask("lazy", row(0, 1))).item() for _ in range(3)] == [1, 2, 3]


async def test_all_fields_of_a_request_reach_a_model_in_a_process(served: ServedInProcesses) -> None:
    body = """
        facts = [request.request_id(), request.correlation_id(), request.flags(), request.timeout(),
                 request.priority(), request.parameters(), request.requested_output_names(), request.model_name()]
        error = pb_utils.TritonError(repr(facts), pb_utils.TritonError.INVALID_ARG)
        return pb_utils.InferenceResponse(error=error)
"""
    await served.add("tells", body)
    long = "x" * 50_000  # too long for one message
    for name in ("r1", long):
        with pytest.raises(Invalid) as told:
            await served.ask(
                "tells",
                row(1),
                id=name,
                sequence_id=7,
                sequence_start=True,
                timeout_us=5,
                priority=2,
                parameters={"a": 1, "b": "c", "n": np.float64(0.5)},
            )
        facts = [name, 7, 1, 5, 2, '{"a": 1, "b": "c", "n": 0.5}', ["OUT"], "tells"]
        assert str(told.value) == repr(facts)[:4096]


async def test_an_exception_of_a_model_fails_its_batch_with_its_own_message(
    served: ServedInProcesses,
) -> None:
    await served.add("raises", "        raise ValueError('too ' + 'much')")
    with pytest.raises(ModelFailed, match="instance 'raises_0', message: ValueError: too much"):
        await served.ask("raises", row(1))
    answers = await served.ask_all("raises", [row(1), row(2)])
    assert all(isinstance(answer, ModelFailed) for answer in answers)
    assert served.lent_bytes() == 0


async def test_strings_and_large_tensors_pass_through_processes(served: ServedInProcesses) -> None:
    await served.add(
        "shout", OUT.format("np.array([[t.upper() for t in r] for r in given], object)"), width=2, dtype=DType.BYTES
    )
    text = np.array([[b"a\0b", "ü".encode()]], np.object_)
    assert (await served.ask("shout", text)).tolist() == [[b"A\0B", "ü".encode()]]
    await served.add("large", OUT.format("given + 1"), width=1_000_000)
    large = np.arange(4_000_000, dtype=np.float32).reshape(4, -1)
    for _ in range(3):
        answer = await served.ask("large", large)
        assert (answer == large + 1).all()
    del answer
    assert served.lent_bytes() == 0


async def test_a_request_without_rows_is_answered_and_its_process_lives(served: ServedInProcesses) -> None:
    worker = await served.add("same", OUT.format("given"))
    child = worker.port.child
    nothing, something = await served.ask("same", np.empty((0, 64), np.float32)), await served.ask("same", row(1))
    assert (nothing.shape, something.shape) == ((0, 64), (1, 64))
    mixed = await served.ask_all("same", [row(1), np.empty((0, 64), np.float32), row(2)])
    assert [getattr(one, "shape", one) for one in mixed] == [(1, 64), (0, 64), (1, 64)]
    assert worker.port.child is child


@pytest.mark.parametrize("requests", [1, 3])
async def test_a_batch_for_which_there_is_no_memory_fails_alone(
    served: ServedInProcesses, monkeypatch: pytest.MonkeyPatch, requests: int
) -> None:
    workers = [await served.add(name, OUT.format("given * 2")) for name in ("one", "two")]
    add_chain(served.engine, "chain", ["one", "two"])
    asked = [row(number) for number in range(requests)]
    lease = workers[0].port.packer.arena.lease
    is_full = False

    def no_memory(*arguments: Any) -> Any:
        if is_full:
            raise MemoryError("so many bytes")
        return lease(*arguments)

    monkeypatch.setattr(workers[0].port.packer.arena, "lease", no_memory)
    for _ in range(3):
        for is_full in (False, True, False):
            answers = await served.ask_all("chain", asked)
            for answer, array in zip(answers, asked, strict=True):
                if is_full:
                    assert isinstance(answer, Overloaded)
                    assert "model 'one', instance 'one_0': a batch cannot be started: MemoryError: so many" in str(
                        answer
                    )
                else:
                    assert isinstance(answer, np.ndarray)
                    assert np.array_equal(answer, array * 4)
    assert all(worker.running is None for worker in workers)
    assert served.engine.loaded.processes is not None
    assert not served.engine.loaded.processes.runs
    del answers, answer
    served.results.clear()
    assert served.lent_bytes() == 0


async def test_an_internal_error_while_a_batch_completes_keeps_its_process_alive(
    served: ServedInProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = (await served.add("twice", OUT.format("given * 2"))).port.child
    scheduler = served.engine.scheduler
    complete = scheduler.complete

    def slip(*_: object) -> None:
        monkeypatch.setattr(scheduler, "complete", complete)
        raise RuntimeError("a slip")

    monkeypatch.setattr(scheduler, "complete", slip)
    with trio.fail_after(10):
        with pytest.raises(
            Internal, match="'twice_0': the results of a batch cannot be processed: RuntimeError: a slip"
        ):
            await served.ask("twice", row(1))
        assert (await served.ask("twice", row(2)))[0, 0] == 4
    assert served.workers["twice"].port.child is child


async def test_a_process_whose_response_cannot_be_read_is_restarted(
    served: ServedInProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await served.add("twice", OUT.format("given * 2"))

    def slip() -> None:
        raise RuntimeError("a slip")

    monkeypatch.setattr(worker.port.channel, "read", slip)
    with trio.fail_after(20):
        with pytest.raises(InstanceDied, match=r"\(RuntimeError: a slip\); it was killed"):
            await served.ask("twice", row(1))
        assert (await served.ask("twice", row(2)))[0, 0] == 4


async def test_a_process_whose_socket_cannot_be_watched_is_ended_and_no_other(
    served: ServedInProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served.engine.loaded.processes is not None
    await served.add("other", OUT.format("given * 3"))

    def full(*_: object) -> None:
        monkeypatch.undo()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(served.engine.loaded.processes.readiness, "watch", full)
    twice = await served.add("twice", OUT.format("given * 2"))
    child = twice.port.child
    with trio.fail_after(20):
        assert (await served.ask("other", row(2)))[0, 0] == 6
        while twice.port.child is child:  # noqa: ASYNC110 - no event to wait for
            await trio.sleep(0.01)
        assert (await served.ask("twice", row(2)))[0, 0] == 4, "it was started again"


@pytest.mark.parametrize(("asked", "unread"), [("two", "two"), ("chain", "(one|two)")], ids=["model", "route"])
async def test_a_batch_fails_without_descriptors_for_its_response_and_its_process_lives(
    served: ServedInProcesses, asked: str, unread: str
) -> None:
    workers = [await served.add(name, OUT.format("given + 1"), width=1_000_000) for name in ("one", "two")]
    children = [worker.port.child for worker in workers]
    add_chain(served.engine, "chain", ["one", "two"])
    given = row(1, 1_000_000)
    kept = [await served.ask(asked, given)]  # further batches need new memory
    with no_more_descriptors():
        for _ in range(3):
            with pytest.raises(Internal, match=rf"what model '{unread}' answered cannot be read: .* \(RLIMIT_NOFILE\)"):
                await served.ask(asked, given)
        kept.clear()
        for results in served.results.values():
            results.clear()
        kept = [await served.ask(asked, given)]  # uses the memory of the first
    kept += [await served.ask(asked, given) for _ in range(2)]
    assert [answer[0, 0] for answer in kept] == [kept[0][0, 0]] * 3
    assert [worker.port.child for worker in workers] == children


async def test_a_batch_fails_without_memory_for_its_response_and_its_process_lives(
    served: ServedInProcesses,
) -> None:
    body = """        import resource
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (3 if given[0, 0] == 2 else most, most))
"""
    await served.add("one", OUT.format("given + 1"), width=1_000_000)
    child = (await served.add("two", body + OUT.format("np.tile(given, (1, 1))"), width=1_000_000)).port.child
    add_chain(served.engine, "chain", ["one", "two"])
    responses = []  # kept, so that each needs its own memory
    for name, number in (("two", 2), ("two", 5), ("chain", 1), ("chain", 5)):
        rows = np.full((3, 1_000_000), number, np.float32)
        if number < 5:
            with pytest.raises(FlowserveError, match=r"'two_0' failed: shared memory of .*: Too many open files"):
                await served.ask(name, rows)
        else:
            responses.append(await served.ask(name, rows))
            assert responses[-1].shape == rows.shape
        served.results["one"].clear()  # otherwise it needs new memory, for which "two" needs a descriptor
    assert served.workers["two"].port.child is child


async def test_a_model_that_fails_to_open_reports_the_reason_and_leaves_no_process(served: ServedInProcesses) -> None:
    for body, why in (
        ("raise RuntimeError('no weights')", "initialize failed: RuntimeError: no weights"),
        ("os._exit(3)", "ended with exit status 3"),
        ("os.kill(os.getpid(), 9)", "SIGKILL"),
    ):
        broken = MODEL.replace("self.runs = 0", body)
        served.repository.write("broken", "1/model.py", broken.format(body=OUT.format("given")))
        config = config_of(name="broken", inputs=[spec("IN")], outputs=[spec("OUT")], max_batch_size=4)
        model = registry.find("python").load(config, served.repository.files("broken"), {})
        make = worker_maker(
            config, model, PROCESS, served.engine.loaded.processes, served.engine.streams, served.engine.clock
        )
        worker = make("broken_0", InstanceGroup("broken", "KIND_CPU"))
        with pytest.raises(ModelFailed, match=why):
            await trio.to_thread.run_sync(worker.open, served.engine.context)


async def test_a_process_that_violates_the_protocol_is_ended_and_its_requests_fail(
    served: ServedInProcesses,
) -> None:
    """A model that finds its socket and answers in place of the backend."""
    body = """
        import socket, struct, gc
        for one in gc.get_objects():
            if isinstance(one, socket.socket):
                one.send(struct.pack("<10Q", 4 | 10 << 8, 1, 0, 0, 0, 0, 77, 0, 4096, 1))
""" + OUT.format("given")
    await served.add("liar", body)
    with trio.fail_after(30):
        with pytest.raises(FlowserveError, match="its process sent an invalid message"):
            await served.ask("liar", row(1))


async def test_the_reply_of_a_later_stage_may_be_read_before_the_memory_of_an_earlier_stage_is_announced(
    served: ServedInProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = [await served.add(name, OUT.format("given * 2")) for name in ("one", "two")]
    children = [worker.port.child for worker in workers]
    add_chain(served.engine, "chain", ["one", "two"])
    assert served.engine.loaded.processes is not None
    assert children[0] is not None
    # Only the second socket is read: the segment of the first process is announced on the first.
    watched = served.engine.loaded.processes.readiness._ready
    monkeypatch.setitem(watched, children[0].socket.fileno(), (lambda: None, lambda error: None))
    with trio.fail_after(10):
        assert (await served.ask("chain", row(1))).tolist() == row(4).tolist()
    assert [worker.port.child for worker in workers] == children


class _Iterations(trio.abc.Instrument):
    """Counts how often the event loop begins to wait for events."""

    def __init__(self) -> None:
        self.count = 0

    def before_io_wait(self, timeout: float) -> None:
        self.count += 1


async def test_a_batch_with_a_route_is_sent_to_the_first_process_and_replied_by_the_last(
    served: ServedInProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("twice", "again", "once")
    for name in names:
        await served.add(name, OUT.format("given * 2"))
    add_chain(served.engine, "chain", names)
    sent: list[str] = []
    replied: list[str] = []
    for name, worker in served.workers.items():
        monkeypatch.setattr(worker, "run", partial(_noted, worker.run, sent, partial(str, name)))
        monkeypatch.setattr(worker, "complete", partial(_noted, worker.complete, replied, partial(str, name)))
    for number in range(50):
        assert (await served.ask("chain", row(number))).tolist() == row(number * 8).tolist()
    assert sent == ["twice"] * 50
    assert replied == ["once"] * 50
    served.results.clear()
    assert served.lent_bytes() == 0


async def test_a_reply_is_followed_by_the_next_steps_batch_in_the_same_iteration(
    served: ServedInProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    iterations = _Iterations()
    trio.lowlevel.add_instrument(iterations)
    for name in ("twice", "again"):
        await served.add(name, OUT.format("given * 2"))
    add_chain(served.engine, "chain", ["twice", "again"])
    served.leave_out_routes()
    read: list[int] = []
    sent: list[int] = []
    channel = served.workers["twice"].port.channel
    worker = served.workers["again"]
    assert channel is not None
    monkeypatch.setattr(channel, "read", partial(_noted, channel.read, read, lambda: iterations.count))
    monkeypatch.setattr(worker, "run", partial(_noted, worker.run, sent, lambda: iterations.count))
    for _ in range(20):
        await served.ask_all("chain", [row(1), row(2)])
    trio.lowlevel.remove_instrument(iterations)
    assert len(sent) >= 20
    assert set(sent) <= set(read)


def _noted(call: Callable[..., Any], log: list[Any], note: Callable[[], Any], *arguments: Any) -> Any:
    """Call the function, and log the result of `note`."""
    log.append(note())
    return call(*arguments)


@pytest.mark.fault("R2")
@pytest.mark.parametrize("asked", ["mortal", "chain"])
async def test_a_process_that_dies_during_a_batch_fails_its_request_by_name(
    served: ServedInProcesses, asked: str
) -> None:
    body = "        if given[0, 0] < 0:\n            os.kill(os.getpid(), 9)\n" + OUT.format("given * 2")
    await served.add("same", OUT.format("given"))
    await served.add("mortal", body)
    add_chain(served.engine, "chain", ["same", "mortal"])
    for number in range(3):
        assert (await served.ask(asked, row(number))).tolist() == row(number * 2).tolist()
    with trio.fail_after(5), pytest.raises(InstanceDied, match=r"'mortal_0'.*SIGKILL"):
        await served.ask(asked, row(-1))
    with trio.fail_after(10):
        assert (await served.ask(asked, row(1))).tolist() == row(2).tolist()


@pytest.mark.fault("W10")
@pytest.mark.parametrize(
    "message",
    [
        bytes(8),
        b"\xff" * 24,
        pack(messages.CANCEL, ()),
        pack(messages.ATTACH, (7,)),
        pack(messages.SHOW, (999,)),
        pack(messages.SPILLED, (1, 2)),
        pack(messages.RUN, (1, 2)),
        encode_run(1, 0, 0, [1], [(0,)], [1, 0, 77, 4096], [None]),  # an unknown free block
        encode_run(1, 9, 0, [0], [(0,)], [0, 0, 0, 0], [(0, 0, 0, (0, 64))]),  # an unknown route
    ],
    ids=["zeros", "bytes", "cancel", "attach", "show", "spilled", "run", "block", "route"],
)
async def test_a_process_that_gets_an_invalid_message_ends_without_a_traceback(
    served: ServedInProcesses, message: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Other processes of a route have its socket, and run other models' code."""
    worker = await served.add("model", OUT.format("given"))
    worker.on_end = None  # no other instance is started
    assert worker.port.channel is not None
    worker.port.channel._socket.send(message)
    with trio.fail_after(30):
        while not worker.ended:  # noqa: ASYNC110 - no event to wait for
            await trio.sleep(0.005)
    assert "exit status 1" in worker.ended
    with trio.fail_after(10):
        while "got an invalid message" not in caplog.text:  # noqa: ASYNC110 - its output is read by another task
            await trio.sleep(0.005)
    assert "Traceback" not in caplog.text


async def test_an_instance_closed_at_the_moment_of_its_restart_leaves_no_process(
    served: ServedInProcesses,
) -> None:
    class Closing(ProcessPort):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "child" and value is not None:
                opened.append(value)
                self.close()
            super().__setattr__(name, value)

    opened: list[Any] = []
    worker = await served.add("model", OUT.format("given"))
    first = worker.port.child
    assert first is not None
    worker.on_end = None  # no other instance is started
    first.kill()
    with trio.fail_after(30):
        while not worker.ended:  # noqa: ASYNC110 - no event to wait for
            await trio.sleep(0.005)
        worker.port.__class__ = Closing
        await trio.to_thread.run_sync(worker.open, served.engine.context)
        (child,) = opened
        assert await trio.to_thread.run_sync(child.wait, 10)
    assert worker.port.child is None


async def test_the_reply_of_a_process_that_ends_before_the_event_loop_reads_it_is_delivered(
    served: ServedInProcesses,
) -> None:
    for name in ("a", "b", "c", "d", "e", "f"):  # trio serves two events in random order
        worker = await served.add(name, "        threading.Event().wait(0.05)\n" + OUT.format("given + 1"))
        answers: list[Any] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_ask_into, answers, served, name)
            while worker.running is None:  # noqa: ASYNC110 - the batch starts in the engine's next step
                await trio.sleep(0.001)
            closing = threading.Thread(target=worker.close)
            closing.start()
            closing.join()  # blocks the event loop until the process has ended
            nursery.cancel_scope.deadline = trio.current_time() + 5
        assert [answer.tolist() for answer in answers] == [row(2).tolist()]


async def _ask_into(answers: list[Any], served: ServedInProcesses, name: str) -> None:
    answers.append(await served.ask(name, row(1)))
