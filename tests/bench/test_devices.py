"""`python -m bench --device` on a small scale, and where there is no such device."""

from __future__ import annotations

import pytest

from bench.__main__ import main
from bench.devices import Chain, measure_device
from flowserve.memory.devices import Devices, using


def test_without_a_gpu_the_benchmark_reports_it_and_measures_nothing() -> None:
    with using(Devices((), "there is no driver")), pytest.raises(SystemExit) as caught:
        main(["--device", "gpu", "--seconds", "0.1", "--rounds", "1"])
    assert caught.value.code == "bench: nothing to measure with --device gpu: there is no driver"


def test_a_chain_is_timed_beside_its_steps() -> None:
    said: list[str] = []
    (chain,) = measure_device("cpu", rounds=2, seconds=0.02, say=said.append, rows=[2])
    assert (chain.device, chain.rows) == ("cpu", 2)
    assert chain.chain_ms > 0 < chain.one_by_one_ms
    assert said == ["2 images, round 1 of 2", "2 images, round 2 of 2"]


def test_the_printed_figure_is_a_ratio() -> None:
    assert str(Chain("gpu", 1, 2.0, 5.0)).endswith("as one chain 2.00 ms, one by one 5.00 ms, 2.50 times")
