"""Thousands of invalid requests to a real server: each gets a response, none is 500, and the server still works.

1500 in the suite; `--fuzz N` makes it N, from the same seed on.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowserve.testing.serve import Served
from flowserve.values import DType
from tests.support.forked import serving
from tests.support.http_fuzz import CORPUS, Insistent, mutated
from tests.support.onnx_files import onnx_identity

GROWTH_BYTES_MAX = 48 << 20
TWICE = """
platform: "ensemble"
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
ensemble_scheduling {
  step { model_name: "same" model_version: -1 input_map { key: "x" value: "x" } output_map { key: "y" value: "a" } }
  step { model_name: "same" model_version: -1 input_map { key: "x" value: "a" } output_map { key: "y" value: "y" } }
}
"""


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("fuzzed")
    for name, dtype in (("same", DType.FP32), ("text", DType.BYTES)):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1" / "model.onnx").write_bytes(onnx_identity(dtype, ("N", "M")))
    (repository / "twice" / "1").mkdir(parents=True)
    (repository / "twice" / "config.pbtxt").write_text(TWICE)
    with serving(
        repository, "--allow-client-shm=true", "--http-max-input-size=1000000", "--http-allowed-hosts=h"
    ) as served:
        yield served


def resident(served: Served) -> int:
    return int(Path(f"/proc/{served.pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.server
def test_a_mutated_request_is_valid_or_refused_with_a_reason(victim: Served) -> None:
    client = Insistent(victim.port)
    answers = [client.ask(asked) for asked in CORPUS]
    client.close()
    refusals = [json.loads(body)["error"][:40] for status, body in answers if status != 200]
    assert refusals == [
        "explicit model load / unload is not allo",
        "Unable to open shared memory region: '/n",
    ]


@pytest.mark.server
@pytest.mark.slow
def test_every_mutated_request_is_answered_without_an_internal_error(
    victim: Served, pytestconfig: pytest.Config
) -> None:
    count = pytestconfig.getoption("--fuzz")
    source = random.Random(20)
    client = Insistent(victim.port)
    settled = 0
    statuses: dict[int, int] = {}
    for number in range(count):
        asked = mutated(source)
        try:
            status, body = client.ask(asked)
        except OSError as error:
            pytest.fail(f"request {number} was not answered: {error!r}: {asked}\n{victim.log[-2000:]}")
        statuses[status] = statuses.get(status, 0) + 1
        assert status != 500, (number, asked, body)
        if status >= 400 and body:
            assert list(json.loads(body)) == ["error"], (number, asked, body)
        if number == count // 3:
            settled = resident(victim)
    client.close()
    assert statuses[200] > count // 50  # some requests are still valid, so that later stages are tested too
    assert statuses[400] > count // 5
    assert resident(victim) - settled < GROWTH_BYTES_MAX
    assert victim.process.poll() is None
    assert "Traceback" not in victim.log
    for asked in CORPUS[:3]:
        assert client.ask(asked)[0] == 200
    client.close()
