"""The measured workloads: their files are complete, and their responses differ by request."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.load import ABSOLUTE_TOLERANCE, RELATIVE_TOLERANCE
from bench.repositories import Onnxruntime, served_models, write_repository
from bench.works import WORKS
from flowserve.config.parse import parse_model_config


@pytest.mark.parametrize("name", WORKS)
@pytest.mark.parametrize("onnx_steps", Onnxruntime)
@pytest.mark.parametrize("varying", [False, True], ids=["fixed", "varying"])
def test_every_model_of_a_repository_has_a_valid_config_and_its_model_file(
    name: str, onnx_steps: Onnxruntime, varying: bool, tmp_path: Path
) -> None:
    work = WORKS[name]
    write_repository(work, tmp_path, onnx_steps, varying=varying)
    deployments = {deployment.name for deployment in work.deployments}
    assert {folder.name for folder in tmp_path.iterdir()} == {*served_models(work), *deployments}

    needs = {"python": "model.py", "onnxruntime": "model.onnx"}
    for folder in tmp_path.iterdir():
        message, _ = parse_model_config((folder / "config.pbtxt").read_text(), f"{folder.name}/config.pbtxt", "pbtxt")
        assert message.name == folder.name
        if folder.name in deployments:
            dims = [-1] * len(work.dims) if varying else [*work.dims]
            assert [*message.input[0].dims] == dims
        if message.backend:
            assert (folder / "1" / needs[message.backend]).is_file()
        else:
            assert message.platform == "ensemble"


@pytest.mark.parametrize("name", WORKS)
def test_responses_differ_by_more_than_the_tolerance_of_the_generator(name: str) -> None:
    work = WORKS[name]
    answers = work.direct()(work.rows(4))
    for i, j in ((0, 1), (1, 2), (2, 3), (0, 3)):
        difference = np.abs(answers[i] - answers[j]).max()
        assert difference > 5 * (ABSOLUTE_TOLERANCE + RELATIVE_TOLERANCE * np.abs(answers[j]).max())


@pytest.mark.parametrize("name", [name for name, work in WORKS.items() if work.slowest])
def test_the_slowest_step_is_also_served_as_a_single_model(name: str) -> None:
    work = WORKS[name]
    alone = work.alone()
    rows = alone.rows(2)
    assert alone.name in served_models(work)
    np.testing.assert_array_equal(alone.direct()(rows), rows + 1)


def test_the_chain_computes_the_composition_of_its_three_steps() -> None:
    chain = WORKS["chain"]
    rows = chain.rows(2)
    np.testing.assert_array_equal(chain.direct()(rows), rows * 2 + 1 - 3)


def test_two_deployments_share_the_model_in_the_middle_and_compute_different_numbers() -> None:
    work = WORKS["shared"]
    assert work.partner is not None
    assert served_models(work).count("shared_add") == 1
    rows = work.rows(2)
    np.testing.assert_array_equal(work.direct()(rows), rows * 2 + 1 - 3)
    np.testing.assert_array_equal(work.partner.direct()(rows), rows * 3 + 1 - 3)


def test_the_diamond_joins_both_its_branches() -> None:
    diamond = WORKS["diamond"]
    rows = diamond.rows(2)
    np.testing.assert_array_equal(diamond.direct()(rows), (rows * 2 + 1) + (rows * 2 - 3))
