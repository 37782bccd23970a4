"""The memory that the process may use, from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowserve.memory.capacity import memory_bytes

MACHINE = memory_bytes(Path("/nonexistent"), Path("/nonexistent"))


def limits(folder: Path, own: str, **files: str) -> int:
    """`files`: the text of each limit, by its path with __ for slashes."""
    (folder / "own").write_text(own)
    for name, text in files.items():
        path = folder / "groups" / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return memory_bytes(folder / "own", folder / "groups")


def test_without_control_groups_it_is_the_machines() -> None:
    assert MACHINE > 1 << 28


@pytest.mark.fault("W3")
def test_the_smallest_limit_of_the_group_and_those_above_it_counts(tmp_path: Path) -> None:
    found = limits(
        tmp_path,
        "0::/a/b\n",
        memory_dot_max="max\n",
        a__memory_dot_max=f"{1 << 20}\n",
        a__memory_dot_high=f"{1 << 19}\n",
        a__b__memory_dot_max=f"{1 << 21}\n",
    )
    assert found == 1 << 19


def test_a_group_that_is_not_visible_in_a_container_is_passed_over(tmp_path: Path) -> None:
    assert limits(tmp_path, "0::/docker/0123/..\n", memory_dot_max="4096000\n") == 4_096_000
    assert limits(tmp_path, "0::/\n", memory_dot_max="max\n") == MACHINE


def test_version_1_is_read_too(tmp_path: Path) -> None:
    own = "12:cpu,cpuacct:/x\n9:memory:/x\n"
    assert limits(tmp_path, own, memory__x__memory_dot_limit_in_bytes="70000\n") == 70_000
    assert limits(tmp_path, own, memory__x__memory_dot_limit_in_bytes=f"{(1 << 63) - 4096}\n") == MACHINE
    assert limits(tmp_path, "not a line\n") == MACHINE
