"""What is kept of sequences between two batches: the very rows that the model answered with, and nobody else's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flowserve.backends.base import Results
from flowserve.config.types import ModelConfig, SequenceBatching, SequenceState, SourceMap
from flowserve.errors import ModelFailed
from flowserve.graph.plain import compile_model
from flowserve.graph.plan import make_plan
from flowserve.memory.assemble import gather, scatter
from flowserve.memory.pool import HOST
from flowserve.memory.tensor import Tensor
from flowserve.runtime.sequence_ports import SequencePorts
from flowserve.scheduling.batch import Batch, ModelQueue
from flowserve.scheduling.batcher import OneByOne
from flowserve.scheduling.lines import Line
from flowserve.scheduling.router import Flow, Ticket
from flowserve.values import DType, Request, TensorSpec

PORT = (TensorSpec("X", DType.FP32, (2,)),), (TensorSpec("Y", DType.FP32, (2,)),)
STATES = (SequenceState("S", "T", DType.FP32, (2,)), SequenceState("U", "V", DType.FP32, (2,)))
CONFIG = ModelConfig(
    "m", "onnxruntime", "", 4, *PORT, SourceMap("config.pbtxt"), sequence=SequenceBatching(1, False, states=STATES)
)
PLAN = make_plan(compile_model(CONFIG, 1))


@pytest.fixture
def ports(tmp_path: Path) -> SequencePorts:
    return SequencePorts(CONFIG, tmp_path)


def tickets(*lines: Line, start: bool = False) -> list[Ticket]:
    made = []
    for line in lines:
        request = Request({}, sequence_id=line.id, sequence_start=start)
        (ticket,) = Flow(PLAN, (), [Tensor(np.zeros((1, 2), np.float32), 0, 1)], 0, 0, request).begin()
        ticket.flow.wanted = ("Y",)
        ticket.line = line
        made.append(ticket)
    return made


def ran(ports: SequencePorts, members: list[Ticket], *states: np.ndarray | None) -> Results:
    """The batch is back: what it answered, and each state as one block of all its rows, None for one left out."""
    blocks = [np.zeros((len(members), 2), np.float32), *states]
    columns = [[None] * len(members) if one is None else [*scatter(one, [1] * len(members))] for one in blocks]
    batch = Batch(ModelQueue(PLAN.nodes[0].model, OneByOne(), ["one"]), "one", members, 0)
    outcome = ports.finish(batch, Results(columns))
    assert isinstance(outcome, Results)
    return outcome


def test_a_batch_that_stays_together_gets_its_state_back_without_a_copy(ports: SequencePorts) -> None:
    lines = [Line(1), Line(2), Line(3)]
    ports.gather(tickets(*lines, start=True))
    state = np.arange(6, dtype=np.float32).reshape(3, 2)
    answered = ran(ports, tickets(*lines, start=True), state, state + 10)
    assert len(answered.outputs) == 1, "the states are nobody's outputs"
    work = ports.gather(tickets(*lines))
    given, copied = gather(work.inputs[1], HOST)
    assert (given is state, copied) == (True, 0)
    assert work.wanted == [("Y", "T", "V")] * 3
    alone, copied = gather(ports.gather(tickets(lines[1])).inputs[2], HOST)
    assert (alone.tolist(), copied) == ([[12.0, 13.0]], 0)


def test_a_state_that_is_left_out_stays_and_a_start_begins_with_zeros(ports: SequencePorts) -> None:
    line = Line(1)
    ran(ports, tickets(line, start=True), np.ones((1, 2), np.float32), np.ones((1, 2), np.float32))
    ran(ports, tickets(line), None, np.full((1, 2), 5, np.float32))
    assert [column[0].array.tolist() for column in ports.gather(tickets(line)).inputs[1:]] == [[[1, 1]], [[5, 5]]]
    again = ports.gather(tickets(line, start=True)).inputs[1:]
    assert [column[0].array.tolist() for column in again] == [[[0, 0]], [[0, 0]]]


def test_an_answer_of_several_rows_is_nobodys_state(ports: SequencePorts) -> None:
    (ticket,) = tickets(Line(1))
    rows = Tensor(np.zeros((2, 2), np.float32), 0, 2)
    with pytest.raises(ModelFailed, match="model 'm' answered state 'T' with 2 rows"):
        ports.take(ticket, [rows, rows, rows])
