"""Simulated deployments make the same decisions as served ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowserve import Graph, model
from flowserve.errors import Invalid, NotFound, Problems, Unsupported
from flowserve.scheduling.rate_limit.limiter import Available
from flowserve.testing import Arrival, Clients, Faked, FakeModel, simulate

CONFIG = """\
backend: "python"
max_batch_size: 4
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ 4 ] }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ 4 ] }} ]
{more}
"""


def one_model(folder: Path, more: str, name: str = "only") -> Path:
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "1" / "model.py").write_text("")
    (folder / name / "config.pbtxt").write_text(CONFIG.format(more=more))
    return folder


def part(**options: Any) -> Any:
    @model({"X": "FP32[4]"}, {"Y": "FP32[4]"}, name=options.pop("name", "part"), **options)
    def same(x: Any) -> Any:
        return x

    return same


def graph_of(*parts: Any) -> Graph:
    graph = Graph("graph")
    tensor: Any = graph.input("X", "FP32[4]")
    for one in parts:
        tensor = one(tensor)
    graph.output("Y", tensor)
    return graph


def test_without_a_delay_a_batch_takes_all_waiting_requests_when_the_instance_is_free() -> None:
    told = simulate(graph_of(part(max_batch_size=4)), arrivals=[0, 1, 2, 3], takes_ms=10)
    assert [(batch.requests, batch.start_ms) for batch in told.batches] == [((0,), 0), ((1, 2, 3), 10)]
    assert [one.latency_ms for one in told.outcomes] == [10, 19, 18, 17]


def test_each_client_sends_its_next_request_when_the_one_before_has_ended() -> None:
    told = simulate(graph_of(part(max_batch_size=2)), arrivals=Clients(3, requests=60), takes_ms=10)
    assert len(told.outcomes) == 60
    moments = sorted(
        [(one.at_ms - one.latency_ms, 1) for one in told.outcomes] + [(one.at_ms, -1) for one in told.outcomes]
    )
    in_flight = most = 0
    for _, change in sorted(moments, key=lambda moment: (moment[0], moment[1])):
        in_flight += change
        most = max(most, in_flight)
    assert most == 3
    assert {batch.rows for batch in told.batches} == {1, 2}  # one of the three always waits
    assert told.requests_per_s == pytest.approx(150, rel=0.05)  # three in 20 ms
    alone = simulate(graph_of(part(max_batch_size=2)), arrivals=Clients(1, requests=10, rows=2), takes_ms=10)
    assert alone.requests_per_s == 100
    with pytest.raises(Invalid, match="count of the clients is a whole number from 1 on, not 0"):
        simulate(graph_of(part()), arrivals=Clients(0))


def test_refused_requests_do_not_end_a_closed_loop(tmp_path: Path) -> None:
    limited = one_model(tmp_path, "dynamic_batching { default_queue_policy { max_queue_size: 1 } }")
    told = simulate(limited, arrivals=Clients(8, requests=20), takes_ms=10)
    assert len(told.outcomes) == 20
    assert told.refused


def test_two_instances_run_at_the_same_time() -> None:
    told = simulate(graph_of(part(max_batch_size=1, instances=2)), arrivals=[0, 0, 0], takes_ms=5)
    assert [(batch.instance, batch.start_ms) for batch in told.batches] == [
        ("part_0_0", 0),
        ("part_0_1", 0),
        ("part_0_0", 5),
    ]


def test_no_batch_exceeds_the_batch_size_of_its_model() -> None:
    arrivals = [Arrival(0, rows=3), Arrival(0, rows=2), Arrival(0, rows=2)]
    told = simulate(graph_of(part(max_batch_size=4)), arrivals=arrivals)
    assert [(batch.requests, batch.rows) for batch in told.batches] == [((0,), 3), ((1, 2), 4)]


def test_models_without_a_batch_dimension_run_requests_one_by_one() -> None:
    told = simulate(graph_of(part()), arrivals=[0, 0], takes_ms=2)
    assert [(batch.requests, batch.end_ms) for batch in told.batches] == [((0,), 2), ((1,), 4)]


def test_a_request_of_higher_priority_runs_first(tmp_path: Path) -> None:
    one_model(tmp_path, "dynamic_batching { priority_levels: 2 default_priority_level: 2 preferred_batch_size: [ 1 ] }")
    told = simulate(tmp_path, arrivals=[0, 1, Arrival(2, priority=1)], takes_ms=10)
    assert [batch.requests for batch in told.batches] == [(0,), (2,), (1,)]


def test_a_request_is_refused_at_its_queue_timeout(tmp_path: Path) -> None:
    one_model(
        tmp_path,
        "dynamic_batching { default_queue_policy { default_timeout_microseconds: 5000 allow_timeout_override: true } }",
    )
    told = simulate(tmp_path, arrivals=[0, 1, Arrival(1, timeout_ms=2)], takes_ms=10)
    assert told.refused == (1, 2)
    assert [(one.request, one.at_ms) for one in told.outcomes] == [(2, 3), (1, 6), (0, 10)]


def test_the_rate_limiter_delays_models(tmp_path: Path) -> None:
    needs = 'instance_group [ { count: 2 kind: KIND_CPU rate_limiter { resources [ { name: "R" count: 1 } ] } } ]'
    one_model(tmp_path, needs)
    free = simulate(tmp_path, arrivals=[0, 0], takes_ms=4)
    assert [batch.start_ms for batch in free.batches] == [0, 0]
    held = simulate(tmp_path, arrivals=[0, 0], takes_ms=4, rate_limit=[Available("R", 1, None)])
    assert [batch.start_ms for batch in held.batches] == [0, 4]


def test_the_same_requests_give_the_same_history() -> None:
    graph = graph_of(part(max_batch_size=4, max_queue_delay_us=700), part(name="next", max_batch_size=2))
    arrivals = [0.1 * number**1.5 for number in range(40)]
    assert str(simulate(graph, arrivals=arrivals)) == str(simulate(graph, arrivals=arrivals))


SEQUENCES = """sequence_batching {{ {strategy} max_sequence_idle_microseconds: 20000 }}
instance_group [ {{ count: 1 kind: KIND_CPU }} ]"""


def asked(at_ms: float, sequence: int, flags: str = "") -> Arrival:
    return Arrival(at_ms, sequence_id=sequence, sequence_start="s" in flags, sequence_end="e" in flags)


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 4 }"])
def test_requests_of_a_sequence_run_one_at_a_time_and_sequences_concurrently(tmp_path: Path, strategy: str) -> None:
    one_model(tmp_path, SEQUENCES.format(strategy=strategy))
    arrivals = [asked(0, 7, "s"), asked(0, 8, "s"), asked(1, 7), asked(1, 7, "e"), asked(1, 8, "e")]
    told = simulate(tmp_path, arrivals=arrivals, takes_ms=2)
    assert [(batch.requests, batch.rows) for batch in told.batches] == [((0, 1), 2), ((2, 4), 2), ((3,), 1)]


def test_sequences_wait_for_a_free_slot_and_a_request_without_start_is_refused(tmp_path: Path) -> None:
    one_model(tmp_path, SEQUENCES.format(strategy="direct { }"))
    arrivals = [asked(0, n, "s") for n in range(1, 6)]  # four slots
    told = simulate(tmp_path, arrivals=[*arrivals, asked(1, 9)])
    assert [(batch.requests, batch.start_ms) for batch in told.batches] == [((0, 1, 2, 3), 0), ((4,), 21)]
    (refusal,) = [one for one in told.outcomes if one.error]
    assert (refusal.request, "must specify the START flag" in str(refusal.error)) == (5, True)


def many(**options: Any) -> Any:
    @model({"X": "FP32[4]"}, {"Y": "FP32[4]"}, name="many", max_batch_size=4, decoupled=True, **options)
    def some(x: Any) -> Any:
        yield x

    return some


def test_a_decoupled_model_sends_its_responses_and_keeps_its_instance_meanwhile() -> None:
    told = simulate(graph_of(many()), arrivals=[0, 1], takes_ms=2, answers=lambda request: 3 - request)
    assert [(batch.requests, batch.start_ms, batch.end_ms) for batch in told.batches] == [((0,), 0, 6), ((1,), 6, 10)]
    assert [(one.request, one.answers_ms) for one in told.outcomes] == [(0, (2, 4, 6)), (1, (8, 10))]
    assert str(told).splitlines()[1:4] == [
        "   2.000 ms  request 0 gets answer 1, after 2 ms",
        "   4.000 ms  request 0 gets answer 2, after 4 ms",
        "   6.000 ms  many_0_0 runs request 1 until 10 ms",
    ]


def test_steps_after_a_decoupled_step_run_per_response_within_its_inflight_limit(tmp_path: Path) -> None:
    slow = part(name="slow", max_batch_size=4)
    free = simulate(graph_of(many(), slow), arrivals=[0], takes_ms={"many": 1, "slow": 10}, answers={"many": 6})
    assert [(batch.requests, batch.start_ms) for batch in free.batches_of("slow")] == [
        ((0,), 1),
        ((0, 0, 0, 0), 11),
        ((0,), 21),
    ]
    limited = Graph("graph", max_inflight_requests=2)
    limited.output("Y", slow(many()(limited.input("X", "FP32[4]"))))
    held = simulate(limited, arrivals=[0], takes_ms={"many": 1, "slow": 10}, answers={"many": 6})
    # Two may be under way: the third answer waits in its send until the first is over.
    assert [len(batch.requests) for batch in held.batches_of("slow")] == [1, 1, 1, 1, 1, 1]
    assert held.batches_of("many")[0].end_ms > free.batches_of("many")[0].end_ms == 6
    assert held.outcomes[0].answers_ms == (11, 21, 31, 41, 51, 61)


def test_a_request_without_responses_completes() -> None:
    told = simulate(graph_of(many()), arrivals=[0], answers=0)
    assert [(one.answers_ms, one.error, one.at_ms) for one in told.outcomes] == [((), None, 0)]
    assert "request 0 is over, after 0 ms, with 0 answers" in str(told)


def gated(folder: Path, **options: str) -> Path:
    keys = "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in options.items()
    )
    return one_model(folder, keys)


def test_a_request_for_a_full_deployment_is_refused_or_waits_as_configured(tmp_path: Path) -> None:
    told = simulate(gated(tmp_path / "a", max_requests="2"), arrivals=[0, 0, 1, 11], takes_ms=10)
    assert (told.refused, [one.request for one in told.outcomes]) == ((2,), [2, 0, 1, 3])
    assert "'only' is full: 2 requests are under way" in str(told.outcomes[0].error)
    waits = simulate(gated(tmp_path / "b", max_requests="1", when_full="wait"), arrivals=[0, 1, 2], takes_ms=10)
    assert [(one.request, one.latency_ms) for one in waits.outcomes] == [(0, 10), (1, 19), (2, 28)]


def test_admission_limits_the_bytes_of_requests_and_applies_their_deadline(tmp_path: Path) -> None:
    by_size = gated(tmp_path / "a", max_request_bytes="40")  # a row has 16
    told = simulate(by_size, arrivals=[Arrival(0, rows=2), 0, Arrival(0, rows=3)], takes_ms=5)
    assert [(one.request, type(one.error).__name__) for one in told.outcomes] == [
        (1, "Unavailable"),
        (2, "TooLarge"),
        (0, "NoneType"),
    ]
    late = simulate(gated(tmp_path / "b", deadline_ms="15"), arrivals=[0, 0], takes_ms=10)
    assert [(one.request, one.at_ms, one.error is None) for one in late.outcomes] == [(0, 10, True), (1, 15, False)]
    assert late.refused == (1,)


def test_a_graph_that_cannot_be_simulated_is_refused_with_a_reason(tmp_path: Path) -> None:
    iterative = "sequence_batching { iterative_sequence: true } model_transaction_policy { decoupled: true }"
    one_model(tmp_path, iterative, "many")
    one_model(tmp_path, "", "other")
    with pytest.raises(Unsupported, match="model 'many' says itself how often a request runs"):
        simulate(tmp_path, "many", arrivals=[0])
    with pytest.raises(NotFound, match="which deployment"):
        simulate(tmp_path, arrivals=[0])
    with pytest.raises(NotFound, match='did you mean "many"'):
        simulate(tmp_path, "mnay", arrivals=[0])
    broken = graph_of(part(max_batch_size=4))
    broken.output("Z")
    with pytest.raises(Problems, match="G10"):
        simulate(broken, arrivals=[0])


def test_a_fake_keeps_its_models_batching_and_needs_none_of_its_files(tmp_path: Path) -> None:
    one_model(tmp_path, "dynamic_batching { max_queue_delay_microseconds: 3000 }")
    (tmp_path / "only" / "1" / "model.py").write_text("import no_such_module")
    told = simulate(Faked(tmp_path, {"only": FakeModel()}), arrivals=[0, 1, 2])
    assert [batch.requests for batch in told.batches] == [(0, 1, 2)]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"takes_ms": -3}, "takes_ms of 'part' is a number of milliseconds from 0 on, not -3"),
        ({"takes_ms": {"part": "3"}}, "takes_ms of 'part' is a number of milliseconds from 0 on, not '3'"),
        ({"takes_ms": lambda rows: float("nan")}, "takes_ms of 'part' is a number of milliseconds from 0 on, not nan"),
        ({"arrivals": [0, -1]}, "at_ms of arrival 1 is a number of milliseconds from 0 on, not -1"),
        ({"arrivals": [Arrival(0, rows=0)]}, "rows of arrival 0 is a whole number from 1 on, not 0"),
        ({"arrivals": [Arrival(0, timeout_ms=-1)]}, "timeout_ms of arrival 0 is a number of milliseconds from 0 on"),
        ({"answers": {"part": 3}}, "answers names 'part', which is not decoupled: it answers each step once"),
        ({"answers": 3}, "answers is given, and no model of the graph is decoupled"),
    ],
)
def test_an_invalid_number_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(Invalid) as refused:
        simulate(graph_of(part(max_batch_size=4)), **{"arrivals": [0], **wrong})
    assert said in str(refused.value)


def test_an_argument_that_is_no_fake_or_graph_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"a fake for 'only' is a FakeModel, as in FakeModel\(function\), not <function"):
        Faked(tmp_path, {"only": lambda rows: rows})  # type: ignore[dict-item]
    for answer in (3, ValueError):
        with pytest.raises(Invalid, match="or raises an exception that is made, not"):
            FakeModel(answer)  # type: ignore[arg-type]
    with pytest.raises(Invalid, match="models are in a repository's folder or in a graph, not in 3"):
        simulate(3, arrivals=[0])  # type: ignore[arg-type]


def test_a_fake_of_an_unknown_model_is_refused(tmp_path: Path) -> None:
    one_model(tmp_path, "")
    with pytest.raises(NotFound, match=r"a fake for 'onyl'.*did you mean \"only\""):
        Faked(tmp_path, {"onyl": FakeModel()}).write_private()
    with pytest.raises(NotFound, match=r"a fake for 'rings', and there is no such model \(there are only\)"):
        Faked(tmp_path, {"rings": FakeModel()}).write_private()


def test_an_unknown_model_in_durations_is_ignored() -> None:
    with pytest.raises(Invalid, match="takes_ms names 'prat'"):
        simulate(graph_of(part(max_batch_size=4)), arrivals=[0], takes_ms={"prat": 3})
    with pytest.raises(Invalid, match=r"answers names 'prat', which the graph does not have \(did you mean \"part\""):
        simulate(graph_of(part(max_batch_size=4)), arrivals=[0], answers={"prat": 3})
