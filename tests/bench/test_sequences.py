"""`python -m bench --sequences` on a small scale."""

from __future__ import annotations

import re

import pytest

from bench.__main__ import main

pytestmark = pytest.mark.server


def test_a_stateful_model_is_compared_with_the_same_model_without_state(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--sequences", "4", "--seconds", "0.2", "--rounds", "1"])
    said = capsys.readouterr().out
    found = re.fullmatch(
        r"4 sequences: (\d+) requests/s \(\d+ us CPU each\), (\d+) \(\d+ us\) without state; "
        r"(\d\.\d\d) of it \((want|must|below): at least 0\.7\)\n",
        said,
    )
    assert found, said
    with_state, without = int(found[1]), int(found[2])
    assert float(found[3]) == pytest.approx(with_state / without, abs=0.02)
