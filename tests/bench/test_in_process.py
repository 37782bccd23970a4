"""`python -m bench --in-process` on a small scale."""

from __future__ import annotations

import pytest

from bench.__main__ import main
from bench.in_process import Costs


@pytest.mark.slow
def test_all_three_ways_of_calling_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--in-process", "--seconds", "0.1", "--rounds", "1"])
    printed = capsys.readouterr().out
    for way in ("session.run", "await engine.infer, under trio", "engine.infer, blocking"):
        assert way in printed


def test_the_target_is_reported_as_reached_or_missed() -> None:
    assert "2.00 times (at most 3: reached)" in str(Costs(10, 20, 50))
    assert "4.00 times (at most 3: missed)" in str(Costs(10, 40, 50))
