"""Models in processes of their own, behind a real engine: the same answers, batches that stay whole without being
copied, and nobody's data but one's own.
"""

from __future__ import annotations

import errno
import os
from typing import Any

import numpy as np
import pytest
import trio

from flowserve.backends import registry
from flowserve.config.types import InstanceGroup
from flowserve.errors import FlowserveError, InstanceDied, Internal, Invalid, ModelFailed
from flowserve.graph.types import GRAPH, Edge, Graph, ModelKey, Node
from flowserve.runtime import alone, crowds, process_host, relay_paths
from flowserve.runtime import engine as engine_module
from flowserve.runtime.alone import LOOK_EVERY, STREAK
from flowserve.runtime.children import SUPPORTED
from flowserve.runtime.hosts import PROCESS, host_maker
from flowserve.runtime.process_host import ProcessHost
from flowserve.testing.backends import config_of, spec
from flowserve.testing.engine import add_chain
from flowserve.testing.processes import MODEL, OUT, ServedInProcesses, no_more_descriptors, row
from flowserve.values import DType, Request

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")


async def test_a_batch_of_sixteen_stays_one_through_a_chain_of_processes_and_nothing_is_copied_between(
    served: ServedInProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crowds, "QUICK_NS", 0)  # or half of them would be left to the next batch
    for name, what in (("twice", "given * 2"), ("plus", "given + 1"), ("minus", "given - 3")):
        await served.add(name, OUT.format(what))
    add_chain(served.engine, "chain", ["twice", "plus", "minus"])
    for _ in range(3):
        answers = await served.ask_all("chain", [row(number) for number in range(16)])
        assert [answer.tolist() for answer in answers if isinstance(answer, np.ndarray)] == [
            row(number * 2 - 2).tolist() for number in range(16)
        ]
    nbytes = 16 * 64 * 4
    assert [list(one.copied) for one in served.results["twice"]] == [[nbytes]] * 3, "requests lie where they came"
    for name in ("plus", "minus"):
        assert [list(one.copied) for one in served.results[name]] == [[0]] * 3
        assert [list(one.placed) for one in served.results[name]] == [[nbytes]] * 3
    del answers
    served.results.clear()
    assert served.lent_bytes() == 0


async def test_two_readers_of_one_output_may_both_write_into_it(served: ServedInProcesses) -> None:
    scribble = "        given *= 10\n" + OUT.format("given")
    await served.add("source", OUT.format("given + 1"))
    for name in ("left", "right"):
        await served.add(name, scribble)
    parts = [served.engine.find(name) for name in ("source", "left", "right")]
    nodes = tuple(
        Node(i, p.name, ModelKey(p.name, 1), p.graph.inputs, p.graph.outputs, 16) for i, p in enumerate(parts)
    )
    inputs = parts[0].graph.inputs
    outputs = tuple(spec(name, (64,)) for name in ("SOURCE", "LEFT", "RIGHT"))
    edges = [Edge("IN", GRAPH, 0, 0, 0), Edge("s", 0, 0, 1, 0), Edge("s", 0, 0, 2, 0)]
    edges += [Edge(f"o{i}", i, 0, GRAPH, i) for i in range(3)]
    config = config_of("", name="fork", inputs=inputs, outputs=outputs, max_batch_size=16)
    served.engine.announce(config, Graph("fork", 1, inputs, outputs, 16, nodes, tuple(edges), is_ensemble=True))
    given = row(4)
    response = await served.engine.infer(served.engine.find("fork"), Request({"IN": given}))
    assert {name: array[0, 0] for name, array in response.outputs.items()} == {"SOURCE": 5, "LEFT": 50, "RIGHT": 50}
    assert given[0, 0] == 4
    assert [list(one.copied) for name in ("left", "right") for one in served.results[name]] == [[0], [0]]


async def test_a_model_may_keep_its_input_and_nobody_overwrites_it(served: ServedInProcesses) -> None:
    body = """
        self.kept.append(given)
        if len(self.kept) > 3:
            del self.kept[:2]
        sums = [float(array[0, 0]) for array in self.kept]
        given = given * 0 + np.array(sums + [0] * (4 - len(sums)), np.float32)
""" + OUT.format("given")
    host = await served.add("keeps", body, width=4)
    said = [(await served.ask("keeps", row(number, 4))).tolist()[0] for number in range(1, 8)]
    assert said[2] == [1, 2, 3, 0]
    assert said[3] == [3, 4, 0, 0]
    assert said[6] == [5, 6, 7, 0], "what it kept is what it got, though seven batches came after"
    link = host.link
    assert link is not None
    with trio.fail_after(5):
        while len(link._kept) > 3:  # it says itself what it has let go of  # noqa: ASYNC110
            await trio.sleep(0.001)
    assert served.lent_bytes() == len(link._kept) * 4096


async def test_an_input_dropped_by_a_thread_of_the_models_comes_home_while_it_idles(served: ServedInProcesses) -> None:
    body = """
        threading.Timer(0.05, self.kept.clear).start()
        self.kept.append(given)
""" + OUT.format("given + 1")
    host = await served.add("later", body)
    await served.ask("later", row(1))
    link = host.link
    assert link is not None
    with trio.fail_after(5):
        while link._kept:  # noqa: ASYNC110
            await trio.sleep(0.001)
    assert served.lent_bytes() == 0


async def test_a_model_that_answers_later_uses_the_list_it_was_given_and_that_time_counts(
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


async def test_a_model_that_takes_requests_out_of_its_list_is_told_that_answers_do_not_match(
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


async def test_what_a_model_imports_from_beside_itself_stays_what_it_is(served: ServedInProcesses) -> None:
    """Imported inside of execute, by a thread, and by what a pickle names: one module, whose state is kept."""
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


async def test_a_request_is_seen_whole_and_answers_may_fail_one_by_one(served: ServedInProcesses) -> None:
    body = """
        facts = [request.request_id(), request.correlation_id(), request.flags(), request.timeout(),
                 request.priority(), request.parameters(), request.requested_output_names(), request.model_name()]
        error = pb_utils.TritonError(repr(facts), pb_utils.TritonError.INVALID_ARG)
        return pb_utils.InferenceResponse(error=error)
"""
    await served.add("tells", body)
    long = "x" * 50_000  # a message that does not fit into a message
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


async def test_what_a_model_raises_fails_its_batch_in_its_own_words(served: ServedInProcesses) -> None:
    await served.add("raises", "        raise ValueError('too ' + 'much')")
    with pytest.raises(ModelFailed, match="instance 'raises_0', message: ValueError: too much"):
        await served.ask("raises", row(1))
    answers = await served.ask_all("raises", [row(1), row(2)])
    assert all(isinstance(answer, ModelFailed) for answer in answers)
    assert served.lent_bytes() == 0


async def test_an_array_that_is_returned_as_it_is_fails_its_request_with_what_was_expected(
    served: ServedInProcesses,
) -> None:
    await served.add("bare", "        return given")
    with pytest.raises(ModelFailed, match="model 'bare' answered ndarray where InferenceResponse was expected"):
        await served.ask("bare", row(1))


async def test_text_and_large_tensors_go_through_processes(served: ServedInProcesses) -> None:
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
    host = await served.add("same", OUT.format("given"))
    child = host.child
    nothing, something = await served.ask("same", np.empty((0, 64), np.float32)), await served.ask("same", row(1))
    assert (nothing.shape, something.shape) == ((0, 64), (1, 64))
    mixed = await served.ask_all("same", [row(1), np.empty((0, 64), np.float32), row(2)])
    assert [getattr(one, "shape", one) for one in mixed] == [(1, 64), (0, 64), (1, 64)]
    assert host.child is child


@pytest.mark.parametrize("requests", [1, 3])
async def test_a_batch_for_which_there_is_no_memory_fails_alone(
    served: ServedInProcesses, monkeypatch: pytest.MonkeyPatch, requests: int
) -> None:
    monkeypatch.setattr(relay_paths, "QUICK_NS", 1 << 60)
    hosts = [await served.add(name, OUT.format("given * 2")) for name in ("one", "two")]
    add_chain(served.engine, "chain", ["one", "two"])
    asked = [row(number) for number in range(requests)]
    lease = hosts[0]._packer.arena.lease
    is_full = False

    def no_memory(*arguments: Any) -> Any:
        if is_full:
            raise MemoryError("so many bytes")
        return lease(*arguments)

    monkeypatch.setattr(hosts[0]._packer.arena, "lease", no_memory)
    for _ in range(3):
        for is_full in (False, True, False):
            answers = await served.ask_all("chain", asked)
            for answer, array in zip(answers, asked, strict=True):
                if is_full:
                    assert isinstance(answer, Internal)
                    assert "model 'one', instance 'one_0': a batch cannot be started: MemoryError: so many" in str(
                        answer
                    )
                else:
                    assert np.array_equal(answer, array * 4)
    assert all(host.running is None and host.relay is None for host in hosts)
    del answers, answer
    served.results.clear()
    assert served.lent_bytes() == 0


async def test_a_batch_whose_answer_cannot_be_taken_in_fails_alone_and_its_process_lives(
    served: ServedInProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = (await served.add("twice", OUT.format("given * 2"))).child
    record = engine_module.record_batch

    def slip(*_: object) -> None:
        monkeypatch.setattr(engine_module, "record_batch", record)
        raise RuntimeError("a slip")

    monkeypatch.setattr(engine_module, "record_batch", slip)
    with trio.fail_after(10):
        with pytest.raises(Internal, match="'twice_0': what came of a batch cannot be taken in: RuntimeError: a slip"):
            await served.ask("twice", row(1))
        assert (await served.ask("twice", row(2)))[0, 0] == 4
    assert served.hosts["twice"].child is child


async def test_a_process_whose_answer_cannot_be_read_for_a_mistake_of_ours_is_ended_and_started_again(
    served: ServedInProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = await served.add("twice", OUT.format("given * 2"))

    def slip() -> None:
        raise RuntimeError("a slip")

    monkeypatch.setattr(host.link, "read", slip)
    with trio.fail_after(20):
        with pytest.raises(InstanceDied, match=r"the server could not go on with it \(RuntimeError: a slip\)"):
            await served.ask("twice", row(1))
        assert (await served.ask("twice", row(2)))[0, 0] == 4


async def test_what_is_to_be_done_about_a_process_and_cannot_be_ends_it_and_nobody_else(
    served: ServedInProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served.engine.processes is not None
    await served.add("other", OUT.format("given * 3"))

    def full(*_: object) -> None:
        monkeypatch.undo()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(served.engine.processes.readiness, "watch", full)
    twice = await served.add("twice", OUT.format("given * 2"))
    child = twice.child
    with trio.fail_after(20):
        assert (await served.ask("other", row(2)))[0, 0] == 6
        while twice.child is child:  # noqa: ASYNC110 - nobody is told of it
            await trio.sleep(0.01)
        assert (await served.ask("twice", row(2)))[0, 0] == 4, "it was started again"


@pytest.mark.parametrize("asked", ["two", "chain"])
async def test_a_batch_whose_answer_cannot_be_seen_for_want_of_descriptors_fails_and_its_process_lives(
    served: ServedInProcesses, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setattr(relay_paths, "QUICK_NS", 1 << 60)
    hosts = [await served.add(name, OUT.format("given + 1"), width=1_000_000) for name in ("one", "two")]
    children = [host.child for host in hosts]
    add_chain(served.engine, "chain", ["one", "two"])
    given = row(1, 1_000_000)
    kept = [await served.ask(asked, given)]  # what comes next needs memory of its own
    with no_more_descriptors():
        for _ in range(3):
            with pytest.raises(Internal, match=r"what model 'two' answered cannot be read: .* \(RLIMIT_NOFILE\)"):
                await served.ask(asked, given)
        kept.clear()
        for results in served.results.values():
            results.clear()
        kept = [await served.ask(asked, given)]  # lies where the first did
    kept += [await served.ask(asked, given) for _ in range(2)]
    assert [answer[0, 0] for answer in kept] == [kept[0][0, 0]] * 3
    assert [host.child for host in hosts] == children


async def test_a_batch_for_whose_answer_there_is_no_memory_fails_and_its_process_lives(
    served: ServedInProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_paths, "QUICK_NS", 1 << 60)
    body = """        import resource
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (3 if given[0, 0] == 2 else most, most))
"""
    await served.add("one", OUT.format("given + 1"), width=1_000_000)
    child = (await served.add("two", body + OUT.format("np.tile(given, (1, 1))"), width=1_000_000)).child
    add_chain(served.engine, "chain", ["one", "two"])
    for name, number in (("two", 2), ("two", 5), ("chain", 1), ("chain", 5)):
        rows = np.full((3, 1_000_000), number, np.float32)
        if number < 5:
            with pytest.raises(FlowserveError, match=r"'two_0' failed: shared memory of .*: Too many open files"):
                await served.ask(name, rows)
        else:
            assert (await served.ask(name, rows)).shape == rows.shape
    assert served.hosts["two"].child is child


async def test_a_model_that_cannot_be_opened_says_why_and_leaves_no_process(served: ServedInProcesses) -> None:
    for body, why in (
        ("raise RuntimeError('no weights')", "initialize failed: RuntimeError: no weights"),
        ("os._exit(3)", "ended with exit status 3"),
        ("os.kill(os.getpid(), 9)", "SIGKILL"),
    ):
        broken = MODEL.replace("self.runs = 0", body)
        served.repository.write("broken", "1/model.py", broken.format(body=OUT.format("given")))
        config = config_of(name="broken", inputs=[spec("IN")], outputs=[spec("OUT")], max_batch_size=4)
        model = registry.find("python").load(config, served.repository.files("broken"), {})
        make = host_maker(config, model, PROCESS, served.engine.processes, served.engine.streaming, served.engine.clock)
        host = make("broken_0", InstanceGroup("broken", "KIND_CPU"))
        with pytest.raises(ModelFailed, match=why):
            await trio.to_thread.run_sync(host.open, served.engine.completions)


async def test_a_process_that_says_what_cannot_be_is_ended_and_its_requests_fail(served: ServedInProcesses) -> None:
    """A model that finds its socket and answers in the backend's place."""
    body = """
        import socket, struct, gc
        for one in gc.get_objects():
            if isinstance(one, socket.socket):
                one.send(struct.pack("<9Q", 4 | 9 << 8, 1, 0, 0, 0, 77, 0, 4096, 1))
""" + OUT.format("given")
    await served.add("liar", body)
    with trio.fail_after(30):
        with pytest.raises(FlowserveError, match="what its process said cannot be"):
            await served.ask("liar", row(1))


def _wait_on_any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models count as quick, however busy the machine is that runs this."""
    monkeypatch.setattr(alone, "QUICK_NS", 1 << 60)
    monkeypatch.setattr(process_host, "_WAIT_MS", 5000)


class _Turns(trio.abc.Instrument):
    """How often the loop went to sleep."""

    def __init__(self) -> None:
        self.count = 0

    def before_io_wait(self, timeout: float) -> None:
        self.count += 1


async def test_a_request_that_is_alone_goes_through_its_processes_in_one_turn_of_the_loop(
    served: ServedInProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    _wait_on_any_machine(monkeypatch)
    for name in ("twice", "again"):
        await served.add(name, OUT.format("given * 2"))
    add_chain(served.engine, "chain", ["twice", "again"])
    for number in range(2 * STREAK):
        await served.ask("chain", row(number))
    turns = _Turns()
    trio.lowlevel.add_instrument(turns)
    at_once = 0
    for number in range(2 * LOOK_EVERY):
        before = turns.count
        answer = await served.ask("chain", row(number))
        assert answer.tolist() == row(number * 4).tolist()
        at_once += turns.count == before
    # Of 16 executions one is left to the loop, and of 8 requests one waits for the end of its turn.
    assert at_once >= LOOK_EVERY
    assert served.lent_bytes() == 0


async def test_what_two_processes_answer_goes_on_in_the_turn_in_which_it_was_read(
    served: ServedInProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_paths, "QUICK_NS", 0)  # they come back to the server in between
    turns = _Turns()
    trio.lowlevel.add_instrument(turns)
    for name in ("twice", "again"):
        await served.add(name, OUT.format("given * 2"))
    add_chain(served.engine, "chain", ["twice", "again"])
    read: list[int] = []
    sent: list[int] = []
    link = served.hosts["twice"].link
    host = served.hosts["again"]
    assert link is not None
    monkeypatch.setattr(link, "read", lambda f=link.read: _noted(f(), read, turns.count))
    monkeypatch.setattr(host, "_send", lambda *work, f=host._send: _noted(f(*work), sent, turns.count))
    for _ in range(20):
        await served.ask_all("chain", [row(1), row(2)])
    assert len(sent) >= 20
    assert set(sent) <= set(read)


def _noted(result: Any, log: list[int], turn: int) -> Any:
    log.append(turn)
    return result


@pytest.mark.fault("R2")
async def test_a_process_that_dies_while_the_loop_waits_for_it_fails_its_request_by_name(
    served: ServedInProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    _wait_on_any_machine(monkeypatch)
    body = "        if given[0, 0] < 0:\n            os.kill(os.getpid(), 9)\n" + OUT.format("given * 2")
    await served.add("mortal", body)
    for number in range(STREAK + 3):
        await served.ask("mortal", row(number))
    with trio.fail_after(5), pytest.raises(InstanceDied, match=r"'mortal_0'.*SIGKILL"):
        await served.ask("mortal", row(-1))


async def test_an_instance_that_is_closed_in_the_moment_in_which_it_is_open_again_leaves_no_process(
    served: ServedInProcesses,
) -> None:
    class Closing(ProcessHost):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "child" and value is not None:
                opened.append(value)
                self.close()
            super().__setattr__(name, value)

    opened: list[Any] = []
    host = await served.add("model", OUT.format("given"))
    first = host.child
    assert first is not None
    host.on_end = None  # nobody else starts another
    first.kill()
    with trio.fail_after(30):
        while not host.ended:  # noqa: ASYNC110 - nobody is told of it
            await trio.sleep(0.005)
        host.__class__ = Closing
        await trio.to_thread.run_sync(host.open, served.engine.completions)
        (child,) = opened
        assert await trio.to_thread.run_sync(child.wait, 10)
    assert host.child is None
