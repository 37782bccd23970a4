"""The steps of one request through its graph."""

from __future__ import annotations

import weakref

import pytest

from flowserve.errors import Invalid, ModelFailed
from flowserve.graph.plan import make_plan
from flowserve.graph.regions import NO_SLOT
from flowserve.graph.types import GRAPH, Edge, Graph, Node
from flowserve.scheduling.frames.frame import Frame, Ticket, request_frame
from flowserve.values import DType, TensorSpec
from tests.support.recorder import PORT, rows_of, simple_model
from tests.support.strategies import Handle, SimModel, chain_graph, plain_graph

FREE = TensorSpec("X", DType.FP32, (-1,))
OTHER = TensorSpec("Y", DType.FP32, (-1,))
MAYBE = TensorSpec("Z", DType.FP32, (2,), optional=True)
FOUR = TensorSpec("X", DType.FP32, (4,))


def graph(models: list[SimModel], edges: list[tuple[int, int, int, int]], outputs: int = 1) -> Graph:
    """An ensemble of one step per model; an edge is (producer, output, consumer, input)."""
    nodes = tuple(
        Node(i, f"{m.key.name}#{i}", m.key, m.inputs, m.outputs, m.max_batch_size) for i, m in enumerate(models)
    )
    return Graph(
        "graph",
        1,
        (FREE,),
        (FREE,) * outputs,
        models[0].max_batch_size,
        nodes,
        tuple(Edge("t", *ends) for ends in edges),
        is_ensemble=True,
    )


def diamond() -> Graph:
    """a -> b, c -> d; both b and c read a's output."""
    a, b, c = simple_model(0), simple_model(1), simple_model(2)
    d = simple_model(3, inputs=(FREE, OTHER))
    edges = [(GRAPH, 0, 0, 0), (0, 0, 1, 0), (0, 0, 2, 0), (1, 0, 3, 0), (2, 0, 3, 1), (3, 0, GRAPH, 0)]
    return graph([a, b, c, d], edges)


def frame_of(graph: Graph, *inputs: Handle | None) -> Frame:
    return request_frame(make_plan(graph), (), inputs, 0)


def finish(frame: Frame, step: Ticket, *outputs: Handle | None) -> list[Ticket]:
    """Finish a step that ran in a batch of its own."""
    return frame.finish_step(step, step.node, [[output] for output in outputs], 0, {})


def names(tickets: list[Ticket]) -> list[str]:
    return [ticket.node.name for ticket in tickets]


def test_a_plain_model_is_one_step() -> None:
    frame = frame_of(plain_graph(simple_model(0)), rows_of(3))
    (step,) = frame.begin()
    assert step.rows == 3
    assert finish(frame, step, rows_of(3)) == []
    assert frame.open == 0


def test_branches_start_together_and_their_join_waits_for_both() -> None:
    frame = frame_of(diamond(), rows_of())
    (a,) = frame.begin()
    b, c = finish(frame, a, rows_of())
    assert names([b, c]) == ["b#1", "c#2"]
    assert finish(frame, c, rows_of()) == []
    assert frame.open == 1
    (d,) = finish(frame, b, rows_of())
    assert finish(frame, d, rows_of()) == []
    assert frame.open == 0


def test_a_tensor_is_released_when_its_last_reader_is_done_and_not_before() -> None:
    frame = frame_of(diamond(), rows_of())
    (a,) = frame.begin()
    made = rows_of()
    held = weakref.ref(made)
    b, c = finish(frame, a, made)
    del made
    assert frame.tensors[0] is None  # the request's own input has no other reader
    assert not frame.is_last_reader(b.node.inputs[0])
    finish(frame, b, rows_of())
    assert held() is not None
    assert frame.is_last_reader(c.node.inputs[0])
    finish(frame, c, rows_of())
    assert held() is None


def test_a_tensor_that_is_also_an_output_is_held_to_the_end() -> None:
    a, b = simple_model(0), simple_model(1)
    both = graph([a, b], [(GRAPH, 0, 0, 0), (0, 0, 1, 0), (0, 0, GRAPH, 0), (1, 0, GRAPH, 1)], outputs=2)
    frame = frame_of(both, rows_of())
    (first,) = frame.begin()
    made = rows_of()
    (second,) = finish(frame, first, made)
    assert not frame.is_last_reader(second.node.inputs[0])
    finish(frame, second, rows_of())
    assert frame.tensors[frame.plan.output_slots[0]] is made


def test_a_step_that_reads_one_tensor_twice_is_one_reader() -> None:
    a, b = simple_model(0), simple_model(1, inputs=(FREE, OTHER))
    twice = graph([a, b], [(GRAPH, 0, 0, 0), (0, 0, 1, 0), (0, 0, 1, 1), (1, 0, GRAPH, 0)])
    frame = frame_of(twice, rows_of())
    (first,) = frame.begin()
    (second,) = finish(frame, first, rows_of())
    assert frame.is_last_reader(second.node.inputs[0])
    assert finish(frame, second, rows_of()) == []
    assert frame.open == 0


def test_an_unread_output_is_never_held() -> None:
    a = simple_model(0, outputs=(FREE, OTHER))
    frame = frame_of(graph([a], [(GRAPH, 0, 0, 0), (0, 1, GRAPH, 0)]), rows_of())
    (step,) = frame.begin()
    assert step.node.outputs == (NO_SLOT, 1)
    assert step.node.wanted == ("Y",)
    unread, read = rows_of(), rows_of()
    finish(frame, step, unread, read)
    assert frame.tensors == [None, read]


def test_a_step_with_unconnected_optional_inputs_begins_immediately() -> None:
    a, b = simple_model(0, inputs=(MAYBE,)), simple_model(1, inputs=(FREE, OTHER))
    source = graph([a, b], [(GRAPH, 0, 1, 0), (0, 0, 1, 1), (1, 0, GRAPH, 0)])
    frame = frame_of(source, rows_of())
    (first,) = frame.begin()
    assert first.rows == 1
    (second,) = finish(frame, first, rows_of())
    finish(frame, second, rows_of())
    assert frame.open == 0


# ------------------------------------------------------------------------------------------------ outputs left out


def test_an_omitted_output_without_another_reader_is_omitted_from_the_response() -> None:
    frame = frame_of(chain_graph("chain", [simple_model(0)]), rows_of())
    (step,) = frame.begin()
    assert finish(frame, step, None) == []
    assert frame.open == 0
    assert frame.tensors[frame.plan.output_slots[0]] is None


def test_a_step_runs_without_an_optional_input_that_its_producer_omitted() -> None:
    a, b = simple_model(0, outputs=(FREE, OTHER)), simple_model(1, inputs=(FREE, MAYBE))
    frame = frame_of(graph([a, b], [(GRAPH, 0, 0, 0), (0, 0, 1, 0), (0, 1, 1, 1), (1, 0, GRAPH, 0)]), rows_of())
    (first,) = frame.begin()
    (second,) = finish(frame, first, rows_of(), None)
    present = frame_of(frame.plan.graph, rows_of())
    (again,) = present.begin()
    (with_both,) = finish(present, again, rows_of(), rows_of())
    assert second.key != with_both.key  # all members of a batch carry the same set of inputs


@pytest.mark.fault("E8")
def test_an_omitted_output_that_a_step_needs_fails_the_request_and_names_both() -> None:
    frame = frame_of(chain_graph("chain", [simple_model(0), simple_model(1)]), rows_of())
    (step,) = frame.begin()
    with pytest.raises(Invalid) as failed:
        finish(frame, step, None)
    assert str(failed.value) == (
        "expected 1 inputs but got 0 inputs for model 'b'. Got input(s) [], but missing required input(s) ['X']. "
        "Please provide all required input(s). Step 'a#0' returned no output 'X'"
    )
    assert "step 'b#1'" in failed.value.lineage


# ------------------------------------------------------------------------------------------------- rows and shapes


def test_varying_shapes_are_the_batch_key_and_fixed_ones_are_not() -> None:
    wide, narrow = (
        frame_of(plain_graph(simple_model(0)), rows_of(width=3)),
        frame_of(plain_graph(simple_model(0)), rows_of(width=2)),
    )
    assert wide.begin()[0].key != narrow.begin()[0].key
    fixed = simple_model(0, inputs=(FOUR,))
    assert frame_of(plain_graph(fixed), rows_of(width=4)).begin()[0].key is None


def test_a_ragged_input_may_differ_within_a_batch() -> None:
    ragged = simple_model(0, inputs=(TensorSpec("X", DType.FP32, (-1,), ragged=True),))
    assert frame_of(plain_graph(ragged), rows_of(width=3)).begin()[0].key is None


def test_inputs_of_different_batch_sizes_are_refused_at_a_step() -> None:
    a, b = simple_model(0), simple_model(1, inputs=(FREE, OTHER))
    frame = frame_of(graph([a, b], [(GRAPH, 0, 0, 0), (GRAPH, 0, 1, 0), (0, 0, 1, 1), (1, 0, GRAPH, 0)]), rows_of(2))
    (step,) = frame.begin()
    with pytest.raises(ModelFailed) as failed:  # a model that batches has other rows than it was given
        finish(frame, step, rows_of(3))
    given, made = "'t' of the request has shape [2,2]", "'t' of model 'a' has shape [3,2]"
    assert str(failed.value) == f"input batch size does not match other inputs for 'b': {given}, {made}"


def test_a_step_with_more_rows_than_the_next_accepts_fails() -> None:
    frame = frame_of(chain_graph("chain", [simple_model(0, 8), simple_model(1, 4)]), rows_of(4))
    (step,) = frame.begin()
    with pytest.raises(Invalid, match=r"^inference request batch-size must be <= 4 for 'b'$"):
        finish(frame, step, rows_of(8))


def test_a_varying_shape_is_checked_against_the_fixed_one_of_its_reader() -> None:
    chain = chain_graph("chain", [simple_model(0), simple_model(1, inputs=(FOUR,))])
    frame = frame_of(chain, rows_of())
    (step,) = frame.begin()
    with pytest.raises(Invalid) as failed:
        finish(frame, step, rows_of(2, width=5))
    text = (
        "unexpected shape for input 'X' for model 'b'. Expected [-1,4], got [2,5]. NOTE: Setting a non-zero max_batch"
    )
    assert str(failed.value).startswith(text)


def test_the_first_dimension_of_a_tensor_without_batching_is_its_row_count() -> None:
    whole = simple_model(0, 0, inputs=PORT, outputs=(TensorSpec("X", DType.FP32, (-1, 4)),))
    batching = simple_model(1, 8, inputs=(FOUR,))
    frame = frame_of(graph([whole, batching], [(GRAPH, 0, 0, 0), (0, 0, 1, 0), (1, 0, GRAPH, 0)]), Handle(0, 4, 0, -1))

    class Matrix(Handle):
        @property
        def shape(self) -> tuple[int, ...]:
            return (3, 4)

    (step,) = frame.begin()
    (following,) = finish(frame, step, Matrix(0, 4, 0, -1))
    assert following.rows == 3


def test_a_batch_dimension_is_checked_against_a_fixed_one_of_its_reader() -> None:
    batching = simple_model(0, 8)
    whole = simple_model(1, 0, inputs=(TensorSpec("X", DType.FP32, (2, -1)),))
    frame = frame_of(graph([batching, whole], [(GRAPH, 0, 0, 0), (0, 0, 1, 0), (1, 0, GRAPH, 0)]), rows_of(3))
    (step,) = frame.begin()
    with pytest.raises(Invalid, match=r"Expected \[2,-1\], got \[3,2\]"):
        finish(frame, step, rows_of(3))
