"""`python -m bench --start`, and that a hundred models start in time."""

from __future__ import annotations

import re

import pytest

from bench.__main__ import main
from flowserve.runtime.processes.children import SUPPORTED

pytestmark = [pytest.mark.server, pytest.mark.skipif(not SUPPORTED, reason="models in processes need Linux")]


def test_the_start_of_models_is_timed_and_the_memory_of_their_processes_is_summed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["--start", "1,3"])
    said = [
        re.fullmatch(
            r"(\d) Python models, each in a process of its own: "
            r"ready in (\d+\.\d) s; (\d+) processes hold (\d+) MiB \(PSS\)",
            line,
        )
        for line in capsys.readouterr().out.splitlines()
    ]
    # The server, the process that forks, and one for each model.
    assert [(int(one[1]), int(one[3])) for one in said if one] == [(1, 3), (3, 5)]
    one, three = (int(found[4]) for found in said if found)
    # Pages that other processes of the machine share count less, so the two readings cannot be compared exactly.
    assert 10 < one < 400
    assert 10 < three < 400


def test_a_hundred_models_in_processes_start_in_less_than_half_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--start", "100"])
    said = re.search(r"100 Python models.*: ready in (\d+\.\d) s; 102 processes", capsys.readouterr().out)
    assert said
    assert float(said[1]) < 30


def test_an_invalid_number_of_models_is_refused() -> None:
    with pytest.raises(SystemExit):
        main(["--start", "0"])
