"""The OpenAPI document: it describes the existing routes, and responses conform to it.

schemathesis makes the requests, from a fixed seed, valid ones and others. They go to a real server.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from flowserve.http.api.app import make_routes
from flowserve.http.api.infer import AppOptions
from flowserve.http.api.openapi import openapi
from flowserve.runtime.engine.engine import Engine
from flowserve.testing.serve import Served
from flowserve.values import DType
from tests.support.forked import serving
from tests.support.onnx_files import onnx_identity

METHODS = {"get", "post", "put", "delete", "patch"}
EXAMPLES = 8  # for each operation
NAMES = ["same", "nobody", "a%b", "é"]


def operations() -> list[tuple[str, str]]:
    return [(method, path) for path, item in openapi()["paths"].items() for method in item if method in METHODS]


def tries() -> list[tuple[str, str, GenerationMode]]:
    """Every operation with valid requests, and with invalid ones if it has parameters or a body."""
    paths = openapi()["paths"]
    return [
        (method, path, mode)
        for method, path in operations()
        # One of these calls would unload the model of the others; the rest take long, or never end.
        if not path.endswith(("/unload", "/live/events", "/timeline"))
        for mode in GenerationMode
        if mode is GenerationMode.POSITIVE or "requestBody" in paths[path][method] or "{version}" in path
    ]


async def test_the_schema_describes_exactly_the_existing_routes(engine: Engine) -> None:
    routes = make_routes(engine, AppOptions(), None)
    there = {(method.lower(), route.path) for route in routes for method in route.methods or () if method != "HEAD"}
    assert set(operations()) == there
    assert len({route.path for route in routes}) == len(routes)


def test_every_reference_has_a_target_and_every_parameter_a_description() -> None:
    document = openapi()
    for reference in set(re.findall(r'"#/([^"]+)"', json.dumps(document))):
        found: Any = document
        for part in reference.split("/"):
            found = found[part]
    for path, item in document["paths"].items():
        named = [one["$ref"].rpartition("/")[2] for one in item.get("parameters", ())]
        assert named == re.findall(r"\{(\w+)\}", path)


async def test_the_schema_is_served(api: Any) -> None:
    client = await api.connect()
    answer = await client.ask(b"GET /openapi.json HTTP/1.1\r\nHost: h\r\n\r\n")
    assert (answer.status, json.loads(answer.body)) == (200, json.loads(json.dumps(openapi())))


# ----------------------------------------------------------------------------------------------------- schemathesis


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of one model, "same", with every feature of the document enabled."""
    repository = tmp_path_factory.mktemp("described")
    (repository / "same" / "1").mkdir(parents=True)
    (repository / "same" / "1" / "model.onnx").write_bytes(onnx_identity(DType.FP32, ("N", "M")))
    options = ("--allow-client-shm=true", "--model-control-mode=explicit", "--load-model=*")
    with serving(repository, *options) as served:
        yield served
        assert served.process.poll() is None
        with urllib.request.urlopen(f"{served.base_url}/v2/models/same/ready") as answer:
            assert answer.status == 200


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.parametrize(("method", "path", "mode"), tries())
def test_responses_conform_to_the_openapi_schema(described: Served, method: str, path: str, mode: Any) -> None:
    schema = schemathesis.openapi.from_dict(json.loads(json.dumps(openapi())))
    operation = schema[path][method.upper()]

    @seed(1)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode), st.sampled_from(NAMES))
    def ask(case: Any, name: str) -> None:
        if "name" in (case.path_parameters or {}) and mode is GenerationMode.POSITIVE:
            case.path_parameters["name"] = name
        response = case.call(base_url=described.base_url, timeout=30)
        assert response.status_code != 500, response.text
        case.validate_response(response, checks=promised)

    promised = [
        schemathesis.checks.CHECKS.get_one(name)
        for name in ("status_code_conformance", "content_type_conformance", "response_schema_conformance")
    ]
    ask()
