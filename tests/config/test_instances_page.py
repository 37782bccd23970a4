"""docs/instances.md is correct: its configurations are accepted, and its command prints the table shown."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from flowserve.backends.registry import find
from flowserve.cli.options import run_arguments
from flowserve.config.load import Draft, finish
from flowserve.config.types import Gpus, LimitedResource, ModelConfig, RateLimiter
from flowserve.errors import Problem
from flowserve.memory.devices import NO_DRIVER
from flowserve.scheduling.rate_limit.limiter import EVERYWHERE, Available, Limiter, Needs, Resource
from flowserve.scheduling.rate_limit.order import OVERTAKEN_MAX

Read = Callable[..., Draft]


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "docs/instances.md").read_text(encoding="utf-8")


@pytest.fixture
def configs(page: str, draft: Read) -> list[ModelConfig]:
    texts = re.findall(r"^```pbtxt\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    return [finish(draft(text, "1/model.onnx", "warmup/real.bin"), None) for text in texts]


def test_the_configurations_of_the_page_are_correct(configs: list[ModelConfig]) -> None:
    groups, warmup, limits = configs
    assert [(group.name, group.count, group.kind, group.passive) for group in groups.instance_groups] == [
        ("main", 3, "KIND_CPU", False),
        ("spare", 1, "KIND_CPU", True),
    ]
    full, real = warmup.warmup
    assert (full.batch_size, full.count, full.inputs["X"].is_random) == (16, 3, True)
    assert (real.batch_size, real.count, real.inputs["X"].file) == (1, 1, "real.bin")
    (group,) = limits.instance_groups
    wanted = (LimitedResource("memory", 4), LimitedResource("licence", 1, is_global=True))
    assert group.rate_limiter == RateLimiter(wanted, priority=2)


def test_refused_examples_of_the_page_are_refused_with_these_messages(
    page: str, judge: Callable[..., list[Problem]]
) -> None:
    (shown,) = re.findall(r"^```text\n(m/config.*)\n```", page, re.MULTILINE)
    tensor = "[ { name: 'X' data_type: TYPE_FP32 dims: 4 } ]"
    text = f'backend: "python"\ninput {tensor}\noutput {tensor}\ninstance_group {{ kind: KIND_GPU }}'
    assert [str(problem) for problem in judge(text, gpus=Gpus(absence=NO_DRIVER))] == [shown]


def test_the_command_of_the_page_prints_its_table(page: str) -> None:
    (command,) = re.findall(r"^```\n(--rate-limit-resource.*)\n```", page, re.MULTILINE)
    arguments = run_arguments("models", *command.split())
    limiter = Limiter([Available(*given) for given in arguments.rate_limit_resource])
    limiter.add([Needs({("R1", device): 1, ("R2", device): 1}) for device in (0, 1)])
    limiter.add([Needs({("R3", EVERYWHERE): 1})])
    table: dict[Resource, int] = {}
    for where, *cells in re.findall(
        r"^\| (the server|device \d) \| (\d* ?)\| (\d* ?)\| (\d* ?)\|$", page, re.MULTILINE
    ):
        device = EVERYWHERE if where == "the server" else int(where.split()[1])
        table |= {(f"R{n}", device): int(cell) for n, cell in enumerate(cells, 1) if cell.strip()}
    assert limiter.total == table


def test_the_numbers_of_the_page_match_the_code(page: str) -> None:
    assert f"after {OVERTAKEN_MAX} executions of other instances" in page
    counts = re.findall(r"\b(onnxruntime|python) (\d)\b", page)
    assert len(counts) == 2
    for backend, count in counts:
        assert find(backend).default_instance_count == int(count)
