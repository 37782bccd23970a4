"""ModelInfer over gRPC beside handlers of grpcio that do nothing: what our side of a call costs.

Decided here: the work (the identity, one node), the client (grpcio's on asyncio, in a process of its own, which sends
the same bytes over and over and checks the first answer), who takes turns (us, and an empty handler on each of grpcio's
two servers, which reads the same message and answers one as large), and what counts: of each the best round.
`python -m bench.grpc_front pool|asyncio` is an empty server, `... load PORT CONCURRENCY SECONDS` the client.
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
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

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


def measure_grpc(plan: Plan, say: Say) -> str:
    """The table of calls per second. Raises BenchFailed."""
    concurrencies, rounds, seconds = plan.concurrency, plan.rounds, plan.seconds
    best: dict[tuple[int, str], float] = {}
    with tempfile.TemporaryDirectory(prefix="bench-grpc-") as folder, contextlib.ExitStack() as stack:
        write_repository(WORKS[NAME], Path(folder), Onnxruntime.BACKEND)
        place = ("--python-execution", plan.python_execution)
        ours = stack.enter_context(serving(Path(folder), "--allow-grpc", "true", "--grpc-port", "0", *place))
        ports = {OURS: ours.grpc_address.rpartition(":")[2]}
        ports |= {kind: stack.enter_context(_empty(kind)) for kind in EMPTY}
        for number in range(rounds):
            for concurrency in concurrencies:
                for side in ports if number % 2 == 0 else reversed(ports):
                    say(f"round {number + 1} of {rounds}, {side}, concurrency {concurrency}")
                    rate = _load(ports[side], concurrency, seconds)
                    best[concurrency, side] = max(best.get((concurrency, side), 0.0), rate)
    return "\n".join(["ModelInfer of a graph of one node, calls/s, best round:", *_rows(concurrencies, best)])


def _rows(concurrencies: Sequence[int], best: dict[tuple[int, str], float]) -> list[str]:
    rows = []
    for concurrency in concurrencies:
        ours = best[concurrency, OURS]
        told = [f"{OURS} {ours:7.0f}"]
        for kind in EMPTY:
            ratio = ours / best[concurrency, kind]
            verdict = "reached" if ratio >= TARGET else "missed"
            told.append(f"empty on {kind} {best[concurrency, kind]:7.0f}: {ratio:.2f} (at least {TARGET}: {verdict})")
        rows.append(f"  concurrency {concurrency:3}: " + ", ".join(told))
    return rows


@contextlib.contextmanager
def _empty(kind: str) -> Any:
    """An empty server's port, until the block ends."""
    command = [sys.executable, "-m", "bench.grpc_front", kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def _load(port: str, concurrency: int, seconds: float) -> float:
    command = [sys.executable, "-m", "bench.grpc_front", "load", port, str(concurrency), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds + 60)
    if done.returncode:
        raise BenchFailed(f"the gRPC client ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    return float(done.stdout)


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


async def _ask(port: str, concurrency: int, seconds: float) -> float:
    """Calls per second."""
    message = _message()
    body = message.SerializeToString()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        first = ModelInferResponse.FromString(await call(body))
        if list(first.raw_output_contents) != list(message.raw_input_contents):
            raise BenchFailed("the answer is not what was sent")
        calls = 0

        async def keep_asking(end: float) -> None:
            nonlocal calls
            while time.perf_counter() < end:
                await call(body)
                calls += 1

        async def all_of_them(for_s: float) -> float:
            nonlocal calls
            calls, began = 0, time.perf_counter()
            await asyncio.gather(*(keep_asking(began + for_s) for _ in range(concurrency)))
            return calls / (time.perf_counter() - began)

        await all_of_them(WARM_UP_S)
        return await all_of_them(seconds)


def _main(arguments: Sequence[str]) -> None:
    match arguments:
        case ["pool"]:
            _serve_pool()
        case ["asyncio"]:
            asyncio.run(_serve_asyncio())
        case ["load", port, concurrency, seconds]:
            print(asyncio.run(_ask(port, int(concurrency), float(seconds))))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        _main(sys.argv[1:])
