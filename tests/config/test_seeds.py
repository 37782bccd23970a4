"""Every configuration that Triton's guides show parses and breaks no rule; what cannot be served yet is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf import text_format

from flowserve.config.load import Draft, find_problems, finish
from flowserve.config.model_config_pb2 import ModelConfig
from flowserve.config.parse import parse_model_config
from flowserve.config.rules import RuleInput
from flowserve.errors import Problems

# File -> the unsupported features (config/unsupported.py) that it uses.
SEEDS: dict[str, set[str]] = {
    "control_inputs": set(),
    "direct_stateful_model": set(),
    "direct_stateful_model_in_one_line": set(),
    "ensemble_model": set(),
    "ensemble_model_unindented": set(),
    "implicit_state": set(),
    "max_inflight_requests": set(),
    "oldest_stateful_model": set(),
    "padded_input": set(),
    "ragged_batch_input": set(),
    "ragged_input": set(),
    "state_from_file": set(),
    "state_from_zero": set(),
}


@pytest.fixture
def seed(root: Path) -> Callable[[str], str]:
    return lambda name: (root / "tests/golden/seeds" / f"{name}.pbtxt").read_text(encoding="utf-8")


def test_every_file_is_checked(root: Path) -> None:
    assert {path.stem for path in (root / "tests/golden/seeds").iterdir()} == set(SEEDS)


@pytest.mark.parametrize("name", SEEDS)
def test_a_seed_parses_as_by_protobuf_and_breaks_no_rule(
    seed: Callable[[str], str], draft: Callable[..., Draft], name: str
) -> None:
    text = seed(name)
    message = parse_model_config(text, name)[0]
    assert message == text_format.Parse(text, ModelConfig())
    read = draft(text, name=message.name or name)
    assert find_problems(RuleInput(read.parsed.message, read.parsed.source, read.folder)) == []


@pytest.mark.parametrize("name", SEEDS)
def test_a_seed_is_served_or_the_missing_feature_is_named(
    seed: Callable[[str], str], draft: Callable[..., Draft], name: str
) -> None:
    text = seed(name)
    read = draft(text, name=parse_model_config(text, name)[0].name or name)
    try:
        config = finish(read, None)
    except Problems as error:
        refused = {problem.rule for problem in error.problems}
    else:
        refused = set()
        assert config.json["name"] == read.folder.name
    assert refused == SEEDS[name]
