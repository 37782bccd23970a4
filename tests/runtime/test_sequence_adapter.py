"""States of sequences between two batches: the output rows of the sequence itself, without a copy where possible."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flowserve.backends.base import Results
from flowserve.config.types import ModelConfig, SequenceBatching, SequenceState, SourceMap
from flowserve.errors import ModelFailed
from flowserve.graph.plan import make_plan
from flowserve.graph.types import compile_model
from flowserve.memory.assemble import gather
from flowserve.memory.column import scatter
from flowserve.memory.pool import HOST
from flowserve.memory.tensor import Tensor
from flowserve.runtime.workers.state import SequenceAdapter
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.frames.frame import Ticket, request_frame
from flowserve.scheduling.model_queue import ModelQueue
from flowserve.scheduling.queue import BatchPolicy, Queue
from flowserve.scheduling.sequence.sequence import RequestSequence
from flowserve.values import DType, Request, TensorSpec
from tests.support.backends import tensors

PORT = (TensorSpec("X", DType.FP32, (2,)),), (TensorSpec("Y", DType.FP32, (2,)),)
STATES = (SequenceState("S", "T", DType.FP32, (2,)), SequenceState("U", "V", DType.FP32, (2,)))
CONFIG = ModelConfig(
    "m", "onnxruntime", "", 4, *PORT, SourceMap("config.pbtxt"), sequence=SequenceBatching(1, False, states=STATES)
)
PLAN = make_plan(compile_model(CONFIG, 1))


@pytest.fixture
def adapter(tmp_path: Path) -> SequenceAdapter:
    return SequenceAdapter(CONFIG, tmp_path)


def tickets(*lines: RequestSequence, start: bool = False) -> list[Ticket]:
    made = []
    for line in lines:
        request = Request({}, sequence_id=line.id, sequence_start=start)
        (ticket,) = request_frame(PLAN, (), [Tensor(np.zeros((1, 2), np.float32), 0, 1)], 0, 0, request).begin()
        ticket.frame.wanted = ("Y",)
        ticket.sequence = line
        made.append(ticket)
    return made


def ran(adapter: SequenceAdapter, members: list[Ticket], *states: np.ndarray | None) -> Results:
    """Complete a batch. Each state is one block with the rows of all members; None: the model omits it."""
    blocks = [np.zeros((len(members), 2), np.float32), *states]
    columns = [[None] * len(members) if one is None else [*scatter(one, [1] * len(members))] for one in blocks]
    batch = Batch(ModelQueue(PLAN.nodes[0].model, Queue(BatchPolicy.single()), ["one"]), "one", members, 0)
    outcome, again = adapter.finish(batch, Results(columns))
    assert isinstance(outcome, Results)
    assert not again
    return outcome


def test_states_of_an_unchanged_batch_are_passed_without_a_copy(adapter: SequenceAdapter) -> None:
    lines = [RequestSequence(1), RequestSequence(2), RequestSequence(3)]
    adapter.work(tickets(*lines, start=True))
    state = np.arange(6, dtype=np.float32).reshape(3, 2)
    answered = ran(adapter, tickets(*lines, start=True), state, state + 10)
    assert len(answered.outputs) == 1, "states are not among the outputs"
    work = adapter.work(tickets(*lines))
    given, copied = gather(tensors(work.inputs[1]), HOST)
    assert (given is state, copied) == (True, 0)
    assert work.wanted == [("Y", "T", "V")] * 3
    alone, copied = gather(tensors(adapter.work(tickets(lines[1])).inputs[2]), HOST)
    assert (alone.tolist(), copied) == ([[12.0, 13.0]], 0)


def test_missing_state_output_keeps_the_state_and_start_resets_it_to_zeros(adapter: SequenceAdapter) -> None:
    line = RequestSequence(1)
    ran(adapter, tickets(line, start=True), np.ones((1, 2), np.float32), np.ones((1, 2), np.float32))
    ran(adapter, tickets(line), None, np.full((1, 2), 5, np.float32))
    kept = [tensors(column) for column in adapter.work(tickets(line)).inputs[1:]]
    assert [state.array.tolist() for (state,) in kept] == [[[1, 1]], [[5, 5]]]
    again = [tensors(column) for column in adapter.work(tickets(line, start=True)).inputs[1:]]
    assert [state.array.tolist() for (state,) in again] == [[[0, 0]], [[0, 0]]]


def test_a_state_output_of_several_rows_for_one_request_is_refused(adapter: SequenceAdapter) -> None:
    (ticket,) = tickets(RequestSequence(1))
    rows = Tensor(np.zeros((2, 2), np.float32), 0, 2)
    with pytest.raises(ModelFailed, match="model 'm' answered state 'T' with 2 rows"):
        adapter.take(ticket, [rows, rows, rows])
