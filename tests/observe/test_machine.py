"""How busy the machine is, out of what its files say."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowserve.observe.machine import Machine
from flowserve.observe.metrics import machine_text

MEMORY = "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 400 kB\nHugePages_Total: 0\n"


def write(proc: Path, *ticks: int, memory: str = MEMORY) -> None:
    (proc / "stat").write_text(f"cpu  {' '.join(map(str, ticks))}\ncpu0 1 1 1 1\n")
    (proc / "meminfo").write_text(memory)


def test_utilization_is_the_share_that_was_not_idle_since_the_last_reading(tmp_path: Path) -> None:
    write(tmp_path, 100, 0, 100, 700, 100, 0, 0, 0, 50, 0)
    machine = Machine(tmp_path)
    write(tmp_path, 120, 0, 110, 750, 120, 0, 0, 0, 70, 0)
    now = machine.read()
    assert now is not None
    assert now.utilization == pytest.approx(30 / 100)
    assert (now.memory_total, now.memory_used) == (1000 * 1024, 600 * 1024)
    again = machine.read()
    assert again is not None
    assert again.utilization == pytest.approx(30 / 100)  # no time has passed: what was known last


def test_a_reading_that_is_too_young_says_what_was_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    write(tmp_path, 0, 0, 0, 0, 0, 0, 0, 0)
    machine = Machine(tmp_path, interval_ms=1000)

    def utilization(*ticks: int) -> float:
        write(tmp_path, *ticks)
        now = machine.read()
        assert now is not None
        return now.utilization

    assert utilization(399, 0, 0, 0, 0, 0, 0, 0) == 0  # of four processors, a hundred a second each
    assert utilization(200, 0, 0, 200, 0, 0, 0, 0) == 0.5
    assert utilization(590, 0, 0, 200, 0, 0, 0, 0) == 0.5
    assert utilization(600, 0, 0, 200, 0, 0, 0, 0) == 1


def test_a_system_that_does_not_tell_has_no_figures(tmp_path: Path) -> None:
    assert Machine(tmp_path).read() is None
    write(tmp_path, 1, 2, 3, 4, 5, 6, 7, 8, memory="nothing")
    assert Machine(tmp_path).read() is None
    assert b"nv_cpu" not in machine_text(Machine(tmp_path), None, None)


def test_the_metrics_carry_the_figures_under_tritons_names(tmp_path: Path) -> None:
    write(tmp_path, 0, 0, 0, 0, 0, 0, 0, 0)
    machine = Machine(tmp_path)
    write(tmp_path, 1, 0, 0, 3, 0, 0, 0, 0)
    text = machine_text(machine, None, None).decode()
    assert "nv_cpu_utilization 0.25" in text
    assert "nv_cpu_memory_total_bytes 1024000" in text
    assert "nv_cpu_memory_used_bytes 614400" in text
