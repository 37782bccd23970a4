"""Simulated deployments decide as served ones do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowserve import Graph, model
from flowserve.errors import Invalid, NotFound, Problems, Unsupported
from flowserve.scheduling.limiter import Available
from flowserve.testing import Arrival, Faked, FakeModel, simulate

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


def test_without_a_delay_a_batch_takes_whoever_waits_when_the_instance_is_free() -> None:
    told = simulate(graph_of(part(max_batch_size=4)), arrivals=[0, 1, 2, 3], takes_ms=10)
    assert [(batch.requests, batch.start_ms) for batch in told.batches] == [((0,), 0), ((1, 2, 3), 10)]
    assert [one.latency_ms for one in told.outcomes] == [10, 19, 18, 17]


def test_two_instances_run_at_the_same_time() -> None:
    told = simulate(graph_of(part(max_batch_size=1, instances=2)), arrivals=[0, 0, 0], takes_ms=5)
    assert [(batch.instance, batch.start_ms) for batch in told.batches] == [
        ("part_0_0", 0),
        ("part_0_1", 0),
        ("part_0_0", 5),
    ]


def test_no_batch_is_larger_than_its_model_takes() -> None:
    arrivals = [Arrival(0, rows=3), Arrival(0, rows=2), Arrival(0, rows=2)]
    told = simulate(graph_of(part(max_batch_size=4)), arrivals=arrivals)
    assert [(batch.requests, batch.rows) for batch in told.batches] == [((0,), 3), ((1, 2), 4)]


def test_models_without_a_batch_dimension_run_requests_one_by_one() -> None:
    told = simulate(graph_of(part()), arrivals=[0, 0], takes_ms=2)
    assert [(batch.requests, batch.end_ms) for batch in told.batches] == [((0,), 2), ((1,), 4)]


def test_a_higher_priority_leaves_first(tmp_path: Path) -> None:
    one_model(tmp_path, "dynamic_batching { priority_levels: 2 default_priority_level: 2 preferred_batch_size: [ 1 ] }")
    told = simulate(tmp_path, arrivals=[0, 1, Arrival(2, priority=1)], takes_ms=10)
    assert [batch.requests for batch in told.batches] == [(0,), (2,), (1,)]


def test_who_waits_longer_than_allowed_is_refused_at_that_moment(tmp_path: Path) -> None:
    one_model(
        tmp_path,
        "dynamic_batching { default_queue_policy { default_timeout_microseconds: 5000 allow_timeout_override: true } }",
    )
    told = simulate(tmp_path, arrivals=[0, 1, Arrival(1, timeout_ms=2)], takes_ms=10)
    assert told.refused == (1, 2)
    assert [(one.request, one.at_ms) for one in told.outcomes] == [(2, 3), (1, 6), (0, 10)]


def test_the_rate_limiter_holds_models_back(tmp_path: Path) -> None:
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


def test_what_cannot_be_simulated_says_why(tmp_path: Path) -> None:
    one_model(tmp_path, "model_transaction_policy { decoupled: true }", "many")
    one_model(tmp_path, "", "other")
    with pytest.raises(Unsupported, match="model 'many' may answer any number of times"):
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


def test_a_fake_for_nothing_is_a_mistake(tmp_path: Path) -> None:
    one_model(tmp_path, "")
    with pytest.raises(NotFound, match=r"a fake for 'onyl'.*did you mean \"only\""):
        Faked(tmp_path, {"onyl": FakeModel()}).write_private()


def test_an_unknown_model_in_durations_is_not_looked_for() -> None:
    with pytest.raises(Invalid, match="takes_ms names 'prat'"):
        simulate(graph_of(part(max_batch_size=4)), arrivals=[0], takes_ms={"prat": 3})
