"""`python -m bench --grpc` on a small scale."""

from __future__ import annotations

import re

import pytest

from bench.__main__ import main


@pytest.mark.slow
@pytest.mark.server
def test_our_calls_are_held_against_those_of_empty_handlers(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--grpc", "--concurrency", "2", "--rounds", "1", "--seconds", "0.1"])
    told = capsys.readouterr().out
    rows = re.findall(
        r"concurrency +(\d+): flowserve +(\d+), empty on asyncio +(\d+): .*, empty on pool +(\d+): ", told
    )
    assert [row[0] for row in rows] == ["2"]
    assert all(int(rate) > 0 for row in rows for rate in row[1:])
