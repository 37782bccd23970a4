"""ModelInfer over gRPC beside handlers of grpcio that do nothing.

The work is the identity, one node. The client is grpcio's on asyncio, in a process of its own; it repeats one request
and checks the first response. flowserve takes turns with an empty handler on each of grpcio's two servers, which parses
the same message and sends one of the same size. The best round of each counts.
`python -m bench.grpc_front pool|asyncio` is an empty server, `... load PORT PID CONCURRENCY SECONDS` the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from bench.processes import cpu_seconds
from bench.repositories import Onnxruntime, write_repository
from bench.runs import Plan, Say
from bench.servers import BenchFailed
from bench.works import WORKS
from flowserve.grpc.service import SERVICE
from flowserve.grpc.service_pb2 import ModelInferRequest, ModelInferResponse
from flowserve.testing.serve import serving

NAME: Final = "identity"
OURS: Final = "flowserve"
EMPTY: Final = ("asyncio", "pool")
TARGET: Final = 0.6  # of an empty handler's calls in a second
POOL_THREADS: Final = 16
WARM_UP_S: Final = 0.3


@dataclass(frozen=True, slots=True, order=True)
class Rate:
    calls_per_second: float
    cpu_us: float

    def __str__(self) -> str:
        return f"{self.calls_per_second:7.0f} ({self.cpu_us:.0f} us)"


def measure_grpc(plan: Plan, say: Say) -> str:
    """The table of calls per second. Raises BenchFailed."""
    concurrencies, rounds, seconds = plan.concurrency, plan.rounds, plan.seconds
    best: dict[tuple[int, str], Rate] = {}
    with tempfile.TemporaryDirectory(prefix="bench-grpc-") as folder, contextlib.ExitStack() as stack:
        write_repository(WORKS[NAME], Path(folder), Onnxruntime.BACKEND)
        place = ("--python-execution", plan.executions[0])
        ours = stack.enter_context(serving(Path(folder), "--allow-grpc", "true", "--grpc-port", "0", *place))
        places = {OURS: (ours.grpc_address.rpartition(":")[2], ours.pid)}
        places |= {kind: stack.enter_context(_empty(kind)) for kind in EMPTY}
        for number in range(rounds):
            for concurrency in concurrencies:
                for side in places if number % 2 == 0 else reversed(places):
                    say(f"round {number + 1} of {rounds}, {side}, concurrency {concurrency}")
                    rate = _load(*places[side], concurrency, seconds)
                    best[concurrency, side] = max(best.get((concurrency, side), rate), rate)
    title = "ModelInfer of a graph of one node, calls/s and CPU time of the server per call, best round:"
    return "\n".join([title, *_rows(concurrencies, best)])


def _rows(concurrencies: Sequence[int], best: dict[tuple[int, str], Rate]) -> list[str]:
    rows = []
    for concurrency in concurrencies:
        ours = best[concurrency, OURS]
        cells = [f"{OURS} {ours}"]
        for kind in EMPTY:
            ratio = ours.calls_per_second / best[concurrency, kind].calls_per_second
            verdict = "reached" if ratio >= TARGET else "missed"
            cells.append(f"empty on {kind} {best[concurrency, kind]}: {ratio:.2f} (at least {TARGET}: {verdict})")
        rows.append(f"  concurrency {concurrency:3}: " + ", ".join(cells))
    return rows


@contextlib.contextmanager
def _empty(kind: str) -> Any:
    """An empty server's port and process id, until the block ends."""
    command = [sys.executable, "-m", "bench.grpc_front", kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process.pid
        finally:
            process.terminate()


def _load(port: str, pid: int, concurrency: int, seconds: float) -> Rate:
    command = [sys.executable, "-m", "bench.grpc_front", "load", port, str(pid), str(concurrency), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds + 60)
    if done.returncode:
        raise BenchFailed(f"the gRPC client ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    return Rate(*map(float, done.stdout.split()))


# ---------------------------------------------------------------------------------------- in processes of their own


def _message() -> ModelInferRequest:
    rows = WORKS[NAME].rows(1)
    message = ModelInferRequest(model_name=NAME)
    message.inputs.add(name="X", datatype="FP32", shape=rows.shape)
    message.raw_input_contents.append(rows.tobytes())
    return message


def _answer() -> ModelInferResponse:
    message = _message()
    answer = ModelInferResponse(model_name=NAME, model_version="1", raw_output_contents=message.raw_input_contents)
    answer.outputs.add(name="Y", datatype="FP32", shape=message.inputs[0].shape)
    return answer


def _handlers(handler: Callable[[Any, Any], Any]) -> tuple[Any]:
    infer = grpc.unary_unary_rpc_method_handler(
        handler, ModelInferRequest.FromString, ModelInferResponse.SerializeToString
    )
    return (grpc.method_handlers_generic_handler(SERVICE, {"ModelInfer": infer}),)


def _serve_pool() -> None:
    answer = _answer()
    server = grpc.server(ThreadPoolExecutor(POOL_THREADS))
    server.add_generic_rpc_handlers(_handlers(lambda request, context: answer))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    server.wait_for_termination()


async def _serve_asyncio() -> None:
    answer = _answer()

    async def infer(request: ModelInferRequest, context: Any) -> ModelInferResponse:
        return answer

    server = grpc.aio.server()
    server.add_generic_rpc_handlers(_handlers(infer))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


async def _call(port: str, pid: int, concurrency: int, seconds: float) -> Rate:
    """Keep `concurrency` calls in flight to the server on `port`, whose process is `pid`."""
    message = _message()
    body = message.SerializeToString()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        first = ModelInferResponse.FromString(await call(body))
        if list(first.raw_output_contents) != list(message.raw_input_contents):
            raise BenchFailed("the answer is not what was sent")
        calls = 0

        async def repeat(end: float) -> None:
            nonlocal calls
            while time.perf_counter() < end:
                await call(body)
                calls += 1

        async def drive(for_s: float) -> Rate:
            nonlocal calls
            calls, began, cpu_before = 0, time.perf_counter(), cpu_seconds(pid)
            await asyncio.gather(*(repeat(began + for_s) for _ in range(concurrency)))
            return Rate(calls / (time.perf_counter() - began), (cpu_seconds(pid) - cpu_before) / calls * 1e6)

        await drive(WARM_UP_S)
        return await drive(seconds)


def _main(arguments: Sequence[str]) -> None:
    match arguments:
        case ["pool"]:
            _serve_pool()
        case ["asyncio"]:
            asyncio.run(_serve_asyncio())
        case ["load", port, pid, concurrency, seconds]:
            rate = asyncio.run(_call(port, int(pid), int(concurrency), float(seconds)))
            print(rate.calls_per_second, rate.cpu_us)
        case _:
            raise SystemExit("usage: python -m bench.grpc_front pool|asyncio|load PORT PID CONCURRENCY SECONDS")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        _main(sys.argv[1:])
