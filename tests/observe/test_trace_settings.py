"""Trace settings: valid values, precedence, selection of requests."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.errors import Invalid, Unsupported
from flowserve.observe.trace_settings import OPENTELEMETRY, TraceChoice, TraceSampler, TraceSettings

ON = TraceChoice("trace.json", ("TIMESTAMPS",), 1)


@given(st.integers(1, 20), st.integers(-1, 5), st.integers(0, 200))
def test_one_of_trace_rate_requests_is_traced_until_trace_count(rate: int, count: int, requests: int) -> None:
    setting = TraceSampler(TraceChoice("f", ("TIMESTAMPS",), rate, count))
    traced = [number for number in range(1, requests + 1) if setting.sample()]
    every = [*range(rate, requests + 1, rate)]
    assert traced == (every if count < 0 else every[:count])
    assert setting.left == (count if count < 0 else count - len(traced))


def test_a_request_traced_by_its_caller_is_traced_regardless_of_rate_and_count() -> None:
    setting = TraceSampler(
        TraceChoice(trace_level=("TIMESTAMPS",), trace_rate=0, trace_count=0, trace_mode=OPENTELEMETRY)
    )
    assert setting.sample(has_context=True)
    assert not setting.sample()
    assert not TraceSampler(TraceChoice("f", ("TIMESTAMPS",), 1, 0)).sample(has_context=True)
    assert not TraceSampler(TraceChoice(trace_mode=OPENTELEMETRY)).sample(has_context=True)


def test_a_model_inherits_the_servers_settings() -> None:
    settings = TraceSettings(ON)
    assert settings.of("m") is settings.of()
    settings.change({"trace_rate": "12", "log_frequency": "34"}, "m")
    settings.change({"trace_rate": "56", "trace_count": "78", "trace_level": ["OFF"]})
    assert settings.of().as_json() == {
        "trace_file": "trace.json",
        "trace_level": ["OFF"],
        "trace_rate": "56",
        "trace_count": "78",
        "log_frequency": "0",
        "trace_mode": "triton",
    }
    assert settings.of("m").as_json() == {**settings.of().as_json(), "trace_rate": "12", "log_frequency": "34"}
    settings.change({"trace_rate": None, "trace_count": None})
    assert settings.of().as_json()["trace_rate"] == "1"
    assert settings.of("m").as_json()["trace_count"] == "-1"
    settings.change({"trace_rate": None, "log_frequency": None}, "m")
    assert settings.of("m") is settings.of()


def test_the_remaining_count_is_kept_when_other_settings_change() -> None:
    settings = TraceSettings(ON)
    settings.change({"trace_count": "5"})
    assert settings.of().sample()
    settings.change({"log_frequency": "2"})
    assert settings.of().as_json()["trace_count"] == "4"
    settings.change({"trace_count": "5"})
    assert settings.of().as_json()["trace_count"] == "5"


@pytest.mark.fault("W10")
@pytest.mark.parametrize("asked", [{"trace_rate": "1"}, {"trace_count": None}, {"trace_level": None}])
def test_settings_that_clients_change_or_reset_share_one_budget(asked: dict[str, Any]) -> None:
    settings = TraceSettings(TraceChoice("trace.json", ("TIMESTAMPS",), 1, 5), api_max_bytes=100)
    assert settings.of().budget is None, "what the operator chose is not limited"
    settings.change({"trace_rate": "2"}, "m")
    settings.change(asked)
    budget = settings.of().budget
    assert budget is not None
    assert budget is settings.of("m").budget
    assert settings.of().sample()
    budget.left = 0
    assert not settings.is_tracing
    assert not settings.of().sample()
    for model in ("m", "n", ""):
        with pytest.raises(Invalid, match="the limit for all of them is reached"):
            settings.change({"trace_rate": "1"}, model)
        settings.change({"trace_level": ["OFF"]}, model)


def test_traces_that_are_not_written_to_files_have_no_budget() -> None:
    settings = TraceSettings(TraceChoice(trace_mode=OPENTELEMETRY), api_max_bytes=0)
    settings.change({"trace_level": ["TIMESTAMPS"], "trace_rate": "1"})
    assert settings.of().sample()


def test_a_replaced_sampler_is_notified() -> None:
    retired: list[TraceSampler] = []
    settings = TraceSettings(ON, retired=retired.append)
    settings.change({"trace_rate": "3"}, "m")
    assert retired == []
    of_model, of_server = settings.of("m"), settings.of()
    settings.change({"trace_count": "3"})
    assert set(retired) == {of_model, of_server}
    retired.clear()
    settings.change({})
    assert retired == []


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"trace_rate": 5}, "trace setting 'trace_rate' is a whole number in a string, from 0"),
        ({"trace_rate": "x"}, "'trace_rate' is a whole number"),
        ({"trace_rate": "-1"}, "'trace_rate' is a whole number"),
        ({"trace_count": "-2"}, "'trace_count' is a whole number in a string, from -1"),
        ({"log_frequency": "4294967296"}, "'log_frequency' is a whole number"),
        ({"trace_level": "TIMESTAMPS"}, "is a list of OFF, TIMESTAMPS, TENSORS"),
        ({"trace_level": []}, "is a list of OFF, TIMESTAMPS, TENSORS"),
        ({"trace_level": ["OFF", "TENSORS"]}, "Expect only one trace level 'OFF' is specified"),
        ({"trace_mode": "mine"}, "is one of triton, opentelemetry"),
        ({"colour": "red"}, "unknown trace setting 'colour'"),
        ({"trace_rate": "0"}, "Attempting to set invalid trace setting: sample rate must be non-zero"),
    ],
)
@pytest.mark.parametrize("model", ["", "m"])
def test_invalid_settings_are_refused_without_a_change(asked: dict[str, Any], text: str, model: str) -> None:
    settings = TraceSettings(ON)
    before = settings.of(model).as_json()
    with pytest.raises(Invalid, match="^" + ".*" + text.replace("'", ".")):
        settings.change({"trace_count": "9", **asked}, model)
    assert settings.of(model).as_json() == before


@pytest.mark.fault("Z3")
def test_clients_cannot_choose_a_file_or_a_mode() -> None:
    settings = TraceSettings(ON)
    with pytest.raises(Unsupported, match="trace file location can not be updated through network protocol"):
        settings.change({"trace_file": "/tmp/elsewhere"})
    with pytest.raises(Unsupported, match="trace mode can not be updated through network protocol"):
        settings.change({"trace_mode": "opentelemetry"})
    settings.change({"trace_mode": "triton", "trace_file": None})
    assert settings.of().as_json()["trace_file"] == "trace.json"


def test_tracing_without_a_destination_cannot_be_enabled() -> None:
    settings = TraceSettings()
    with pytest.raises(Invalid, match="trace file name is not given"):
        settings.change({"trace_level": ["TIMESTAMPS"]})

    def check(choice: TraceChoice) -> None:
        raise Invalid("no room")

    settings = TraceSettings(TraceChoice("trace.json"), check=check)
    with pytest.raises(Invalid, match="no room"):
        settings.change({"trace_level": ["TIMESTAMPS"]})
    assert not settings.is_tracing
