"""vLLM without a model: the part of its interface that flowserve uses, on an engine that batches by steps.

A step takes `step_ms`; in it each running sequence gets one token, and waiting sequences replace ended ones, up to
`max_num_seqs`. The tokens for a prompt are its words in capitals, repeated up to `max_tokens`. The first word may be
`refuse` (the request is refused at once), `break` (the request fails after two tokens), `die` (the engine fails),
`exit` (the process exits) or `silent` (there are no tokens). Each event is a line of JSON in the file `log`. Both
settings are in `additional_config`, which vLLM has too.

`package` writes a package `vllm` for a server's process; the names below are those of vLLM.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_MODULES = {
    "": "AsyncEngineArgs, SamplingParams",
    "lora.request": "LoRARequest",
    "sampling_params": "RequestOutputKind, StructuredOutputsParams",
    "v1.engine.async_llm": "AsyncLLM",
}


def package(folder: Path) -> Path:
    """Write the package into a folder for `PYTHONPATH`."""
    for name, names in _MODULES.items():
        *parents, last = ["vllm", *name.split(".")] if name else ["vllm", "__init__"]
        place = folder.joinpath(*parents)
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{last}.py").write_text(f"from tests.support.fake_vllm import {names}\n")
    return folder


class EngineDeadError(Exception):
    pass


class EngineGenerateError(Exception):
    pass


class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class StructuredOutputsParams:
    choice: list[str] | None = None


class SamplingParams:
    n: int
    temperature: float
    max_tokens: int | None
    stop: str | list[str] | None
    ignore_eos: bool
    structured_outputs: StructuredOutputsParams | None
    output_kind: RequestOutputKind

    def __init__(self, **given: Any) -> None:
        if given.keys() - SamplingParams.__annotations__.keys():
            raise TypeError(f"unexpected keyword arguments {[*given]}")
        self.n = given.get("n", 1)
        self.temperature = given.get("temperature", 1.0)
        self.max_tokens = given.get("max_tokens", 16)
        self.stop = given.get("stop")
        self.ignore_eos = given.get("ignore_eos", False)
        self.structured_outputs = given.get("structured_outputs")
        self.output_kind = given["output_kind"]
        if self.temperature < 0:
            raise ValueError(f"temperature must be non-negative, got {self.temperature}.")


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass
class AsyncEngineArgs:
    model: str = ""
    max_num_seqs: int = 256
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    gpu_memory_utilization: float = 0.9
    enable_lora: bool = False
    enable_log_requests: bool = False
    additional_config: dict[str, Any] = field(default_factory=dict)


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Any = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None


@dataclass
class RequestOutput:
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]
    finished: bool


@dataclass(eq=False)
class _Request:
    name: str
    words: list[str]
    params: SamplingParams
    lora: LoRARequest | None
    made: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    tokens: list[str] = field(default_factory=list)


class AsyncLLM:
    @classmethod
    def from_engine_args(cls, args: AsyncEngineArgs) -> AsyncLLM:
        if args.model == "missing":
            raise OSError("missing is not a local folder and is not a valid model identifier")
        return cls(args)

    def __init__(self, args: AsyncEngineArgs) -> None:
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=args.max_num_seqs))
        self.errored = False
        self._args = args
        self._waiting: list[_Request] = []
        self._running: list[_Request] = []
        self._tell("start", model=args.model, gpus=os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        self._stepping = asyncio.create_task(self._step_for_ever())

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, *, lora_request: LoRARequest | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        if self.errored:
            raise EngineDeadError("EngineCore encountered an issue.")
        words = prompt["prompt"].split()
        if words[0] == "refuse":
            raise ValueError("The decoder prompt is longer than the maximum model length of 7.")
        request = _Request(request_id, words, sampling_params, lora_request)
        self._waiting.append(request)
        structure = sampling_params.structured_outputs
        self._tell(
            "add",
            request,
            temperature=sampling_params.temperature,
            stop=sampling_params.stop,
            choice=structure and structure.choice,
            images=[image.size for image in prompt.get("multi_modal_data", {}).get("image", ())],
        )
        try:
            while True:
                made = await request.made.get()
                if isinstance(made, Exception):
                    raise made
                yield made
                if made.finished:
                    return
        except GeneratorExit:  # in most versions, vLLM also aborts after a cancellation
            await self.abort(request_id)
            raise

    async def abort(self, request_id: str) -> None:
        for requests in (self._waiting, self._running):
            for request in [*requests]:
                if request.name == request_id:
                    requests.remove(request)
                    self._tell("abort", request)

    def shutdown(self) -> None:
        self._tell("shutdown")
        self._stepping.cancel()

    async def _step_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._args.additional_config.get("step_ms", 1) / 1000)
            room = self._args.max_num_seqs - sum(one.params.n for one in self._running)
            while self._waiting and (self._waiting[0].params.n <= room or not self._running):
                room -= self._waiting[0].params.n
                self._running.append(self._waiting.pop(0))
                self._tell("begin", self._running[-1])
            for request in [*self._running]:
                self._token(request)

    def _token(self, request: _Request) -> None:
        kind, made = request.words[0], request.tokens
        if kind == "silent":
            return
        if kind in ("break", "die", "exit") and len(made) == 2:
            self._fail(request, kind)
            return
        word = request.words[len(made) % len(request.words)]
        made.append(f" {word.upper()}")
        is_last = len(made) == (request.params.max_tokens or 16)
        reason = "length" if is_last else None
        prompt = [*range(len(request.words))]
        if request.params.output_kind is RequestOutputKind.DELTA:
            for index in range(request.params.n):  # one after the other, as from vLLM
                one = CompletionOutput(index, made[-1], [1], None, -0.5 * len(made), reason)
                request.made.put_nowait(RequestOutput(prompt, [one], is_last and index == request.params.n - 1))
        elif is_last:
            whole = [
                CompletionOutput(index, "".join(made), [1] * len(made), None, -0.5 * len(made), reason)
                for index in range(request.params.n)
            ]
            request.made.put_nowait(RequestOutput(prompt, whole, True))
        if is_last:
            self._running.remove(request)
            self._tell("end", request)

    def _fail(self, request: _Request, kind: str) -> None:
        self._tell(kind, request)
        if kind == "exit":
            os._exit(7)
        failed = [request]
        error: Exception = EngineGenerateError("the kernel failed")
        if kind == "die":
            self.errored = True
            failed = [*self._running, *self._waiting]
            error = EngineDeadError("EngineCore encountered an issue.")
        for one in failed:
            (self._running if one in self._running else self._waiting).remove(one)
            one.made.put_nowait(error)

    def _tell(self, event: str, request: _Request | None = None, **more: Any) -> None:
        log = self._args.additional_config.get("log")
        if log is None:
            return
        told = {"event": event, "running": len(self._running), "waiting": len(self._waiting), "pid": os.getpid()}
        if request is not None:
            told |= {
                "id": request.name,
                "words": " ".join(request.words),
                "lora": request.lora and request.lora.lora_path,
            }
        with open(log, "a") as file:
            file.write(json.dumps(told | more) + "\n")
