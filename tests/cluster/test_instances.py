"""Models whose instances are on other machines, here processes: batches, errors, ends, restarts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import trio

from flowserve.config.placement import ModelPlace
from tests.support.clusters import ask, local_cluster, row, serving, write_python


async def test_a_model_on_another_machine_answers_as_one_here(tmp_path: Path) -> None:
    write_python(tmp_path, "there")
    write_python(tmp_path, "here")
    with local_cluster(1) as cluster:
        async with serving(tmp_path, cluster, {"there": ModelPlace("there")}) as (engine, _):
            for size in (1, 64, 200_000):
                value = np.arange(size, dtype=np.float32)[None]
                there, here = await ask(engine, "there", value), await ask(engine, "here", value)
                assert (there["OUT"] == value * 2).all()
                assert (there["OUT"] == here["OUT"]).all()
                assert there["PID"].item() != here["PID"].item()
