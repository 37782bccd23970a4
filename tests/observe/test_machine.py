"""CPU and memory figures from files of /proc."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowserve.observe.machine import MachineMeter, machine_text

MEMORY = "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 400 kB\nHugePages_Total: 0\n"


def write(proc: Path, *ticks: int, memory: str = MEMORY) -> None:
    (proc / "stat").write_text(f"cpu  {' '.join(map(str, ticks))}\ncpu0 1 1 1 1\n")
    (proc / "meminfo").write_text(memory)


def test_utilization_is_the_share_of_busy_time_since_the_last_reading(tmp_path: Path) -> None:
    write(tmp_path, 100, 0, 100, 700, 100, 0, 0, 0, 50, 0)
    machine = MachineMeter(tmp_path)
    write(tmp_path, 120, 0, 110, 750, 120, 0, 0, 0, 70, 0)
    figures = (pytest.approx(30 / 100), 1000 * 1024, 600 * 1024)
    assert machine.read() == figures
    assert machine.read() == figures  # no time has passed: the last value


def test_a_reading_within_the_interval_returns_the_last_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    write(tmp_path, 0, 0, 0, 0, 0, 0, 0, 0)
    machine = MachineMeter(tmp_path, interval_ms=1000)

    def utilization(*ticks: int) -> float:
        write(tmp_path, *ticks)
        now = machine.read()
        assert now is not None
        return now[0]

    assert utilization(399, 0, 0, 0, 0, 0, 0, 0) == 0  # of four processors, a hundred a second each
    assert utilization(200, 0, 0, 200, 0, 0, 0, 0) == 0.5
    assert utilization(590, 0, 0, 200, 0, 0, 0, 0) == 0.5
    assert utilization(600, 0, 0, 200, 0, 0, 0, 0) == 1


def test_without_procfs_there_are_no_figures(tmp_path: Path) -> None:
    assert MachineMeter(tmp_path).read() is None
    write(tmp_path, 1, 2, 3, 4, 5, 6, 7, 8, memory="nothing")
    assert MachineMeter(tmp_path).read() is None
    assert b"nv_cpu" not in machine_text(MachineMeter(tmp_path), None, None)


def test_machine_metrics_have_tritons_names(tmp_path: Path) -> None:
    write(tmp_path, 0, 0, 0, 0, 0, 0, 0, 0)
    machine = MachineMeter(tmp_path)
    write(tmp_path, 1, 0, 0, 3, 0, 0, 0, 0)
    text = machine_text(machine, None, None).decode()
    assert "nv_cpu_utilization 0.25" in text
    assert "nv_cpu_memory_total_bytes 1024000" in text
    assert "nv_cpu_memory_used_bytes 614400" in text
