"""Backend `vllm`: language models by vLLM's asynchronous engine, with the files and tensors of Triton's vLLM backend.

Decides how `model.json` becomes the engine's arguments, which GPUs the engine sees, how the tensors of a request become
a prompt and sampling parameters, and what its responses contain. vLLM computes with CUDA in processes of its own: it is
imported in worker processes only, unless a model says otherwise.

The only module that imports vllm. It does not know queues, seats or threads (continuous/). Callers: the registry.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import logging
import os
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from itertools import count
from types import MappingProxyType
from typing import Any, Final, get_args

import numpy as np

from flowserve.backends.library.interface import ModelSource
from flowserve.backends.more.continuous.backend import ContinuousBackend
from flowserve.config.suggest import did_you_mean
from flowserve.config.types import InstanceGroup
from flowserve.errors import Invalid, Place, Problem, Problems
from flowserve.values import Array, DType, Request, TensorSpec

log = logging.getLogger("flowserve.load")

MODEL_FILE: Final = "model.json"
LORA_FILE: Final = "multi_lora.json"
GPU_IDS: Final = "GPU_DEVICE_IDS"
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
# The optional outputs, by the input that asks for each.
_ASKED_BY: Final = {
    "finish_reason": "return_finish_reason",
    "cumulative_logprob": "return_cumulative_logprob",
    "logprobs": "return_logprobs",
    "num_input_tokens": "return_num_input_tokens",
    "num_output_tokens": "return_num_output_tokens",
}
_FLAGS: Final = ("stream", "exclude_input_in_output", *_ASKED_BY.values())


class Vllm:
    """The package behind the backend."""

    name = "vllm"
    title = "vLLM"
    requirement = "flowserve[vllm]"
    modules: Sequence[str] = ("vllm",)
    default_filename = MODEL_FILE
    inputs: Sequence[TensorSpec] = (
        TensorSpec("text_input", DType.BYTES, (1,)),
        TensorSpec("image", DType.BYTES, (-1,), optional=True),
        TensorSpec("sampling_parameters", DType.BYTES, (1,), optional=True),
        *(TensorSpec(name, DType.BOOL, (1,), optional=True) for name in _FLAGS),
    )
    outputs: Sequence[TensorSpec] = (
        TensorSpec("text_output", DType.BYTES, (-1,)),
        TensorSpec("finish_reason", DType.BYTES, (-1,)),
        TensorSpec("cumulative_logprob", DType.FP32, (-1,)),
        TensorSpec("logprobs", DType.BYTES, (-1,)),
        TensorSpec("num_input_tokens", DType.UINT32, (1,)),
        TensorSpec("num_output_tokens", DType.UINT32, (-1,)),
    )
    ignored: Mapping[str, str] = MappingProxyType(
        {
            "REPORT_CUSTOM_METRICS": "the server's own metrics count requests, responses and their times",
            "ENABLE_VLLM_HEALTH_CHECK": "an engine that has ended is always replaced by a new one",
        }
    )

    def check(self, source: ModelSource) -> None:
        arguments_of(source)
        loras_of(source)

    async def start(self, source: ModelSource, group: InstanceGroup, *, owns_process: bool) -> VllmEngine:
        arguments = arguments_of(source)
        gpus = gpus_of(source, group, arguments)
        if gpus and owns_process:
            os.environ[_VISIBLE] = gpus  # before vLLM looks for them
        elif gpus:
            raise source.wrong("execution", "must be 'process' for an engine on chosen GPUs")
        return VllmEngine(source, arguments)


def make_backend() -> ContinuousBackend:
    return ContinuousBackend(Vllm())


# ---------------------------------------------------------------------------------------------- files and parameters


def arguments_of(source: ModelSource) -> dict[str, Any]:
    """The arguments of the engine. Raises Problems."""
    return _json_object(source, source.path.name)


def loras_of(source: ModelSource) -> dict[str, str]:
    """The folders of LoRA adapters by name, empty if they are not enabled. Raises Problems."""
    if str(arguments_of(source).get("enable_lora", "")).lower() != "true":
        return {}
    return {name: str(path) for name, path in _json_object(source, LORA_FILE).items()}


def _json_object(source: ModelSource, name: str) -> dict[str, Any]:
    path = source.path.with_name(name)
    line, column, what = 1, 1, 'it is not an object: write the arguments as { "model": "..." }'
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    except json.JSONDecodeError as error:
        line, column, what = error.lineno, error.colno, f"it is not JSON: {error.msg}"
    except (OSError, UnicodeDecodeError) as error:
        what = f"it cannot be read: {error}"
    text = f"failed to load '{source.config.name}' version {source.files.version}: {name}: {what}"
    raise Problems([Problem(text, Place(source.files.shown(path), line, column))])


def gpus_of(source: ModelSource, group: InstanceGroup, arguments: Mapping[str, Any]) -> str:
    """The GPUs that the engine of an instance may see, separated by commas; "" for all. Raises Problems."""
    needed = int(arguments.get("tensor_parallel_size", 1)) * int(arguments.get("pipeline_parallel_size", 1))
    if group.kind == "KIND_GPU" and group.gpus:
        if needed > 1:
            text = f"model '{source.config.name}' has instances of kind KIND_GPU, and its engine needs {needed} GPUs"
            raise Problems([Problem(text, source.config.source.place("instance_group"), hint="write kind: KIND_MODEL")])
        return str(group.gpus[0])
    named = [part.strip() for part in source.text(GPU_IDS).split(",") if part.strip()]
    if not all(part.isascii() and part.isdecimal() for part in named) or len({*named}) != len(named):
        raise source.wrong(
            GPU_IDS, f"must be different numbers of GPUs, separated by commas, found '{','.join(named)}'"
        )
    if named and needed > 1 and len(named) != needed:
        raise source.wrong(GPU_IDS, f"names {len(named)} GPUs, and the engine needs {needed}")
    return ",".join(named)


def _engine_arguments(kind: Any, source: ModelSource, arguments: dict[str, Any]) -> Any:
    """vLLM's object of arguments. Raises Problems for an argument that this version of vLLM does not have."""
    known = {one.name for one in dataclasses.fields(kind)}
    given = dict(arguments)
    old = given.pop("disable_log_requests", None) if "disable_log_requests" not in known else None
    if old is not None:  # the samples of Triton's backend have it; later versions of vLLM have its opposite
        given.setdefault("enable_log_requests", str(old).lower() != "true")
    for key in ("enable_lora", "enable_log_requests"):
        if isinstance(given.get(key), str):
            given[key] = given[key].lower() == "true"
    problems = [
        Problem(
            f"failed to load '{source.config.name}' version {source.files.version}: vLLM has no argument '{key}'",
            Place(source.file),
            hint=did_you_mean(key, known) or "its name may differ between versions of vLLM",
        )
        for key in given
        if key not in known
    ]
    if problems:
        raise Problems(problems)
    return kind(**given)


# ---------------------------------------------------------------------------------------------- the engine


class VllmEngine:
    """vLLM's engine for one instance. Made on the thread of its loop."""

    def __init__(self, source: ModelSource, arguments: dict[str, Any]) -> None:
        from vllm import AsyncEngineArgs, SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.async_llm import AsyncLLM

        self._engine = AsyncLLM.from_engine_args(_engine_arguments(AsyncEngineArgs, source, arguments))
        self.seats = int(self._engine.vllm_config.scheduler_config.max_num_seqs)
        self._sampling = SamplingParams
        self._kinds = {True: RequestOutputKind.DELTA, False: RequestOutputKind.FINAL_ONLY}
        self._loras = {
            name: LoRARequest(name, number, path)
            for number, (name, path) in enumerate(loras_of(source).items(), start=1)
        }
        self._numbers = count(1)
        self._model = source.config.name

    def read(self, inputs: Mapping[str, Array], request: Request) -> VllmCall:
        text = _text(inputs["text_input"], "text_input")
        flags = {name: bool(_first(inputs[name], name)) for name in _FLAGS if name in inputs}
        is_streaming = flags.get("stream", False)
        has_prompt = not flags.get("exclude_input_in_output", is_streaming)
        if has_prompt and is_streaming:
            raise Invalid("Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed.")
        sampling, lora = self._parameters(inputs, request, is_streaming)
        prompt: dict[str, Any] = {"prompt": text}
        if "image" in inputs and inputs["image"].size:
            prompt["multi_modal_data"] = {"image": [_image(one) for one in inputs["image"].ravel()]}
        asked = [output for output, name in _ASKED_BY.items() if flags.get(name)]
        return VllmCall(f"{self._model}-{next(self._numbers)}", prompt, sampling, lora, is_streaming, has_prompt, asked)

    async def generate(self, call: VllmCall) -> AsyncGenerator[Any, None]:
        made = self._engine.generate(call.prompt, call.sampling, call.id, lora_request=call.lora)
        try:
            async for output in made:
                yield output
        finally:
            await made.aclose()  # an unfinished one is aborted

    async def abort(self, call: VllmCall) -> None:
        if not self._engine.errored:
            await self._engine.abort(call.id)

    def has_ended(self) -> bool:
        return bool(self._engine.errored)

    def close(self) -> None:
        self._engine.shutdown()

    def _parameters(self, inputs: Mapping[str, Array], request: Request, is_streaming: bool) -> tuple[Any, Any]:
        """Sampling parameters and LoRA adapter. Raises Invalid."""
        given: Any = dict(request.parameters)
        where = "a request parameter"
        if "sampling_parameters" in inputs:
            where = "input 'sampling_parameters'"
            try:
                given = json.loads(_text(inputs["sampling_parameters"], "sampling_parameters") or "{}")
            except ValueError as error:
                raise Invalid(f"{where} for model '{self._model}' is not JSON: {error}") from error
            if not isinstance(given, dict):
                raise Invalid(f"{where} for model '{self._model}' must be a JSON object")
        given = {key: value for key, value in given.items() if value is not None}
        name = given.pop("lora_name", None)
        if name is not None and name not in self._loras:
            there = ", ".join(self._loras) or "none: enable_lora in model.json and multi_lora.json name them"
            raise Invalid(f"LoRA {name} is not supported, model '{self._model}' has {there}")
        guided = given.pop("guided_decoding", None)
        if guided is not None:
            given.setdefault("structured_outputs", guided)
        types = self._sampling.__annotations__
        for key, value in given.items():
            if key not in types or key.startswith("_") or key == "output_kind":
                hint = did_you_mean(key, types) or "its sampling parameters are those of vLLM's SamplingParams"
                raise Invalid(f"{where} for model '{self._model}' has '{key}', which vLLM does not know: {hint}")
            given[key] = _converted(value, types[key])
        try:
            if "structured_outputs" in given:
                given["structured_outputs"] = _structure(given["structured_outputs"])
            made = self._sampling(**given, output_kind=self._kinds[is_streaming])
        except (TypeError, ValueError) as error:
            raise Invalid(f"{where} for model '{self._model}' cannot be used: {error}") from error
        return made, self._loras.get(name)


class VllmCall:
    """One request, and the engine's output for it since the last response."""

    def __init__(
        self,
        number: str,
        prompt: Mapping[str, Any],
        sampling: Any,
        lora: Any,
        is_streaming: bool,
        has_prompt: bool,
        asked: Sequence[str],
    ) -> None:
        self.id = number
        self.prompt = prompt
        self.sampling = sampling
        self.lora = lora
        self.seats = max(1, int(getattr(sampling, "n", 1) or 1))
        self.is_streaming = is_streaming
        self._asked = asked
        self._prompt_tokens = 0
        self._sequences = [_Sequence() for _ in range(self.seats)]
        if has_prompt:
            for sequence in self._sequences:
                sequence.text = [prompt["prompt"]]

    def add(self, output: Any) -> bool:
        self._prompt_tokens = len(output.prompt_token_ids or ())
        for one in output.outputs:
            sequence = self._sequences[one.index]
            sequence.text.append(one.text)
            sequence.tokens += len(one.token_ids)
            sequence.logprobs += one.logprobs or ()
            sequence.has_logprobs = one.logprobs is not None
            sequence.cumulative_logprob = one.cumulative_logprob or 0.0
            sequence.finish_reason = str(one.finish_reason)
        return bool(output.finished)

    def response(self) -> dict[str, Array]:
        made: dict[str, Array] = {"text_output": _strings([one.take_text() for one in self._sequences])}
        for name in self._asked:
            if name == "num_input_tokens":
                made[name] = np.array([self._prompt_tokens], np.uint32)
            elif name == "num_output_tokens":
                made[name] = np.array([one.tokens for one in self._sequences], np.uint32)
            elif name == "cumulative_logprob":
                made[name] = np.array([one.cumulative_logprob for one in self._sequences], np.float32)
            elif name == "finish_reason":
                made[name] = _strings([one.finish_reason for one in self._sequences])
            else:
                made[name] = _strings([one.logprobs_text() for one in self._sequences])
        for one in self._sequences:
            one.tokens = 0
            one.logprobs.clear()
        return made


class _Sequence:
    """The output for one sequence of a request since the last response; reason and sum are those of the whole
    sequence.
    """

    def __init__(self) -> None:
        self.text: list[str] = []
        self.tokens = 0
        self.logprobs: list[Mapping[int, Any]] = []
        self.has_logprobs = False
        self.cumulative_logprob = 0.0
        self.finish_reason = "None"

    def take_text(self) -> str:
        text = "".join(self.text)
        self.text.clear()
        return text

    def logprobs_text(self) -> str:
        """JSON: for each token the candidates by their numbers, each with logprob, rank and text."""
        if not self.has_logprobs:
            return "null"
        tokens = [
            {
                str(token): {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.decoded_token}
                for token, one in candidates.items()
            }
            for candidates in self.logprobs
        ]
        return json.dumps(tokens)


# ---------------------------------------------------------------------------------------------- conversions


def _first(array: Array, name: str) -> Any:
    """The element that counts, whatever the dims of the input in the configuration."""
    if not array.size:
        raise Invalid(f"inference input '{name}' must hold one element, and is empty")
    return array.flat[0]


def _text(array: Array, name: str) -> str:
    element = _first(array, name)
    try:
        return element.decode() if isinstance(element, bytes) else str(element)
    except UnicodeDecodeError as error:
        raise Invalid(f"inference input '{name}' must hold UTF-8 text: {error}") from error


def _strings(texts: Sequence[str]) -> Array:
    made = np.empty(len(texts), np.object_)
    made[:] = [text.encode("utf-8", "replace") for text in texts]
    return made


def _image(element: Any) -> Any:
    """An image of a request: a file of any usual format, in base64."""
    from PIL import Image

    try:
        return Image.open(io.BytesIO(base64.b64decode(element, validate=True))).convert("RGB")
    except (ValueError, OSError) as error:
        raise Invalid(f"inference input 'image' must hold image files in base64: {error}") from error


def _converted(value: Any, annotation: Any) -> Any:
    """A value of a sampling parameter; clients of Triton's backend may send numbers as text. Raises Invalid."""
    text = annotation if isinstance(annotation, str) else " ".join(map(_name, get_args(annotation) or (annotation,)))
    kinds = {*re.findall(r"\w+", text)}
    if not isinstance(value, str) or "str" in kinds:
        return value
    try:
        if "bool" in kinds and value.lower() in ("true", "false"):
            return value.lower() == "true"
        for kind in (int, float):
            if kind.__name__ in kinds:
                return kind(value)
    except ValueError as error:
        raise Invalid(f"sampling parameter '{value}' must be a number") from error
    return value


def _name(kind: Any) -> str:
    return str(getattr(kind, "__name__", kind))


def _structure(value: Any) -> Any:
    """vLLM's object of structured outputs, from its fields as JSON."""
    from vllm.sampling_params import StructuredOutputsParams

    fields = json.loads(value) if isinstance(value, str) else dict(value)
    fields.pop("backend", None)  # the backend of guided decoding: newer versions choose it for the whole engine
    return StructuredOutputsParams(**fields)
