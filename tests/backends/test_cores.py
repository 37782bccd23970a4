"""The number of processors that a process may use, with control groups as files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flowserve.backends.cores import cores_allowed, group_limit


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/\n", {}, None),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/pod/one\n", {"pod/cpu.max": "200000 100000", "pod/one/cpu.max": "max 100000"}, 2.0),
        ("0::/pod/one\n", {"pod/cpu.max": "400000 100000", "pod/one/cpu.max": "50000 100000"}, 0.5),
        ("0::/../outside\n", {"cpu.max": "300000 100000"}, 3.0),
        ("4:cpu,cpuacct:/d\n0::/\n", {"cpu/d/cpu.cfs_quota_us": "250000", "cpu/d/cpu.cfs_period_us": "100000"}, 2.5),
        ("4:cpu:/d\n", {"cpu/d/cpu.cfs_quota_us": "-1", "cpu/d/cpu.cfs_period_us": "100000"}, None),
        ("4:cpu:/d\n", {"cpu/d/cpu.cfs_quota_us": "100", "cpu/d/cpu.cfs_period_us": "0"}, None),
        ("nonsense\n", {"cpu.max": "nonsense"}, None),
    ],
)
def test_the_smallest_limit_of_all_groups_around_counts(
    tmp_path: Path, groups: str, files: dict[str, str], limit: float | None
) -> None:
    (tmp_path / "proc").write_text(groups)
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert group_limit(tmp_path / "proc", tmp_path / "root") == limit
    bound = len(os.sched_getaffinity(0))
    allowed = bound if limit is None else max(1, min(bound, int(limit)))
    assert cores_allowed(tmp_path / "proc", tmp_path / "root") == allowed


def test_without_control_groups_the_bound_processors_count(tmp_path: Path) -> None:
    assert cores_allowed(tmp_path / "none", tmp_path) == len(os.sched_getaffinity(0))
