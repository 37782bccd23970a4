"""`python -m bench --packages`."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.packages import Profile, measure_packages, package_of


def test_functions_belong_to_two_levels_of_flowserve_or_to_their_library() -> None:
    assert package_of("/checkout/flowserve/runtime/engine/engine.py") == "runtime/engine"
    assert package_of("/flowserve/checkout/flowserve/runtime/loop.py") == "runtime"
    assert package_of("/checkout/flowserve/values.py") == "values"
    assert package_of("/venv/site-packages/trio/_core/_run.py") == "trio"
    assert package_of("<attrs generated methods trio._core._traps.WaitTaskRescheduled>") == "trio"
    assert package_of("/models/double/1/model.py") == "model.py"
    assert package_of("/usr/lib/python3.11/json/decoder.py") == "other"


def test_packages_are_sorted_by_cpu_time_and_small_ones_are_added_up() -> None:
    profile = Profile("flowserve", 8, {"a": 2.0, "b": 5.0, "c": 1.0}, {"a": 60.0, "b": 39.5, "c": 0.5}, 20.0)
    lines = [line.split() for line in str(profile).splitlines()[1:]]
    assert [line[-4:] for line in lines] == [
        ["a", "2.0", "60.0", "60%"],
        ["b", "5.0", "39.5", "40%"],
        ["others)", "1.0", "0.5", "0%"],
        ["(together)", "8.0", "100.0", "100%"],
        ["kernel)", "0.0", "20.0", "20%"],
    ]


@pytest.mark.slow
@pytest.mark.server
def test_a_request_is_profiled_by_package_in_this_checkout_and_in_another(root: Path) -> None:
    mine, other = measure_packages(str(root), (2,), rounds=1, seconds=0.5, say=print)
    assert [mine.server, other.server] == ["flowserve", "before"]
    for profile in (mine, other):
        assert profile.calls["scheduling"] > 5
        assert 1 < profile.calls["trio"] < 100
        assert profile.cpu_us["http/server"] > 0
        # The kernel counts its time in ticks, of which half a second may have none.
        assert 0 <= profile.kernel_us < sum(profile.cpu_us.values()) < 100_000
