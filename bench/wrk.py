"""`wrk` as a second client: the same requests as the load generator's, sent by a third-party program.

It is used where it is installed. It checks the status of each response and not its numbers, measures whole seconds, and
sends the requests of a folder in turn over all connections.
"""

from __future__ import annotations

import json
import math
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

from bench.load import LoadFailed, Measured
from bench.processes import cpu_seconds
from flowserve.cli.load import ANSWER_TIMEOUT_S

# Called as `wrk -s SCRIPT URL -- FOLDER COUNT`. The requests are complete HTTP messages, read before the first is sent.
_SCRIPT: Final = """\
local requests, count, current = {}, 0, 0

function init(arguments)
  count = tonumber(arguments[2])
  for i = 0, count - 1 do
    local file = assert(io.open(arguments[1] .. "/" .. i .. ".request", "rb"))
    requests[i] = file:read("*a")
    file:close()
  end
end

function request()
  current = (current + 1) % count
  return requests[current]
end

function done(summary, latency)
  local errors = summary.errors
  io.write(string.format(
    '{"requests": %d, "duration_us": %d, "p50_us": %d, "p99_us": %d, "bad_status": %d, "broken": %d}\\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99), errors.status,
    errors.connect + errors.read + errors.write + errors.timeout))
end
"""


def installed() -> bool:
    return shutil.which("wrk") is not None


def measure(folder: Path, port: int, server_pid: int, concurrency: int, warmup_s: float, seconds: float) -> Measured:
    """Run the closed loop of `wrk` with one thread; both times are rounded up to seconds. Raises LoadFailed."""
    if warmup_s:
        _run(folder, port, concurrency, warmup_s)
    server_before, load_before = cpu_seconds(server_pid), _children_cpu_s()
    found = _run(folder, port, concurrency, seconds)
    server_after, load_after = cpu_seconds(server_pid), _children_cpu_s()
    return Measured(
        requests=found["requests"],
        seconds=found["duration_us"] / 1e6,
        p50_ms=found["p50_us"] / 1e3,
        p99_ms=found["p99_us"] / 1e3,
        load_cpu_s=load_after - load_before,
        server_cpu_s=server_after - server_before,
    )


def _run(folder: Path, port: int, concurrency: int, seconds: float) -> dict[str, Any]:
    script = folder / "post.lua"
    script.write_text(_SCRIPT)
    count = len(list(folder.glob("*.request")))
    duration = math.ceil(seconds)
    options = ["-t1", f"-c{concurrency}", f"-d{duration}s", "--timeout", f"{ANSWER_TIMEOUT_S:.0f}s", "-s", str(script)]
    command = ["wrk", *options, f"http://127.0.0.1:{port}"]
    try:
        finished = subprocess.run(
            [*command, "--", str(folder), str(count)], capture_output=True, text=True, timeout=duration + 30.0
        )
    except subprocess.TimeoutExpired as error:
        raise LoadFailed("wrk did not end") from error
    lines = [line for line in finished.stdout.splitlines() if line.startswith("{")]
    if finished.returncode or not lines:
        raise LoadFailed(f"wrk ended with status {finished.returncode}: {finished.stdout}{finished.stderr}")
    found: dict[str, Any] = json.loads(lines[-1])
    if found["bad_status"] or found["broken"] or not found["requests"]:
        raise LoadFailed(f"wrk reports failed requests: {lines[-1]}")
    return found


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
