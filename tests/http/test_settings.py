"""Log and trace settings: which of them can be changed over HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowserve.http.api.infer import AppOptions
from flowserve.observe.settings import LogChoice, LogSettings
from flowserve.runtime.engine.engine import Engine

LOG = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}
TRACE = {
    "trace_file": "",
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_mode": "triton",
}


async def ask(running: Any, method: str, path: str, asked: Any = None) -> tuple[int, Any]:
    body = b"" if asked is None else json.dumps(asked).encode()
    client = await running.connect()
    answer = await client.ask(
        f"{method} {path} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    )
    return answer.status, json.loads(answer.body)


@pytest.fixture
def applied() -> list[LogChoice]:
    return []


@pytest.fixture
async def logged(engine: Engine, start: Any, applied: list[LogChoice]) -> Any:
    return await start(engine, AppOptions(log=LogSettings(apply=applied.append)))


async def test_log_settings_can_be_read_and_changed(logged: Any, applied: list[LogChoice]) -> None:
    assert await ask(logged, "GET", "/v2/logging") == (200, LOG)
    changed = {"log_info": False, "log_verbose_level": 2, "log_format": "ISO8601"}
    assert await ask(logged, "POST", "/v2/logging", changed) == (200, {**LOG, **changed})
    assert await ask(logged, "GET", "/v2/logging") == (200, {**LOG, **changed})
    assert applied == [LogChoice(log_info=False, log_verbose_level=2, log_format="ISO8601")]
    assert await ask(logged, "POST", "/v2/logging") == (200, {**LOG, **changed})


@pytest.mark.fault("Z3")
@pytest.mark.parametrize("extra", [{}, {"log_info": False}])
async def test_log_and_trace_files_cannot_be_set_over_http(
    logged: Any, applied: list[LogChoice], tmp_path: Path, extra: dict[str, Any]
) -> None:
    target = tmp_path / "log"
    status, answer = await ask(logged, "POST", "/v2/logging", {**extra, "log_file": str(target)})
    assert (status, answer) == (501, {"error": "log file location can not be updated through network protocol"})
    status, answer = await ask(logged, "POST", "/v2/trace/setting", {"trace_file": str(target)})
    assert (status, answer) == (501, {"error": "trace file location can not be updated through network protocol"})
    assert not target.exists()
    assert not applied
    assert await ask(logged, "GET", "/v2/logging") == (200, LOG)


@pytest.mark.parametrize(
    "asked",
    [
        {"log_verbose_level": -1},
        {"log_verbose_level": True},
        {"log_verbose_level": "1"},
        {"log_verbose_level": 2**40},
        {"log_info": 1},
        {"log_format": "JSON"},
        {"log_format": ["default"]},
        {"log_everything": True},
        [],
    ],
)
async def test_an_invalid_log_setting_is_400_and_changes_nothing(
    logged: Any, applied: list[LogChoice], asked: Any
) -> None:
    status, answer = await ask(logged, "POST", "/v2/logging", asked)
    assert (status, list(answer)) == (400, ["error"])
    assert not applied


async def test_an_embedded_server_refuses_log_settings(api: Any) -> None:
    status, answer = await ask(api, "POST", "/v2/logging", {"log_info": False})
    assert status == 501
    assert "belongs to the program around it" in answer["error"]


@pytest.mark.parametrize(
    "asked",
    [
        {"trace_level": "OFF"},
        {"trace_level": ["MAX"]},
        {"trace_level": [1]},
        {"trace_rate": 1000},
        {"trace_rate": "fast"},
        {"trace_count": "-2"},
        {"trace_mode": 1},
        {"trace_everything": "1"},
    ],
)
async def test_an_invalid_trace_setting_is_400(api: Any, asked: Any) -> None:
    assert (await ask(api, "POST", "/v2/trace/setting", asked))[0] == 400


async def test_trace_settings_of_a_server_without_a_file_cannot_turn_traces_on(api: Any, engine: Engine) -> None:
    status, answer = await ask(api, "POST", "/v2/trace/setting", {"trace_level": ["TIMESTAMPS"]})
    assert status == 400
    assert answer["error"].startswith("Attempting to set invalid trace setting: trace file name is not given")
    own = {**TRACE, "trace_rate": "7"}
    assert await ask(api, "POST", "/v2/models/double/trace/setting", {"trace_rate": "7"}) == (200, own)
    assert await ask(api, "GET", "/v2/models/double/trace/setting") == (200, own)
    assert await ask(api, "POST", "/v2/models/double/trace/setting", {"trace_rate": None}) == (200, TRACE)
    assert (await ask(api, "POST", "/v2/trace/setting", {"trace_mode": "opentelemetry"}))[0] == 501
    assert await ask(api, "GET", "/v2/trace/setting") == (200, TRACE)
    assert not engine.traces.is_on


async def test_an_unknown_model_has_no_trace_settings(api: Any) -> None:
    assert (await ask(api, "GET", "/v2/models/nobody/trace/setting"))[0] == 400
