"""What a right configuration may ask for and this version cannot do yet: one small function per feature.

Decided here: that a feature which would change results is refused by name, never ignored. A feature that arrives
deletes its line here. What is merely a hint about speed is listed in ignored.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from flowserve.config.rules.subject import Rule, Subject
from flowserve.errors import Problem

YET: Final = "is not supported yet"
_EXPORT: Final = "export it: torch.onnx.export(model, inputs, '1/model.onnx', dynamo=True), or call it in a model.py"
_TENSORRT_LLM: Final = (
    "its engines are no TensorRT plans: call TensorRT-LLM in a decoupled model.py, or run trtllm-serve beside"
    " this server"
)
# What to do instead, by backend.
OTHER_BACKENDS: Final[Mapping[str, str]] = {
    "pytorch": _EXPORT,
    "libtorch": _EXPORT,
    "vllm": "call vLLM in a decoupled model.py, an answer for each piece of text, or run `vllm serve` beside this"
    " server",
    "tensorrtllm": _TENSORRT_LLM,
    "tensorrt_llm": _TENSORRT_LLM,
    "dali": "run the DALI pipeline, or the same steps with numpy and Pillow, in a model.py",
    "fil": "convert the trees to ONNX (onnxmltools for XGBoost and LightGBM, skl2onnx for scikit-learn), or call their"
    " library in a model.py",
    "identity": "write a model.py that answers what it is given, or an ONNX file of Identity nodes",
    "tensorflow": "convert it to ONNX: pip install tf2onnx, then python -m tf2onnx.convert --saved-model"
    " 1/model.savedmodel --output 1/model.onnx, and leave `platform` out",
    "openvino": "serve the ONNX file that the model was converted from: name it model.onnx and leave `backend`"
    " and `platform` out",
}


def _not_yet(s: Subject, path: str, feature: str, hint: str = "") -> Problem:
    return s.problem(path, f"model '{s.message.name}': {feature} {YET}", hint)


def decoupled(s: Subject) -> Iterator[Problem]:
    """Only code can answer when it likes. An ensemble's own flag means nothing: what its steps are decides."""
    if s.message.model_transaction_policy.decoupled and not s.is_ensemble and s.message.backend == "onnxruntime":
        text = "a decoupled model_transaction_policy of an ONNX model"
        yield _not_yet(s, "model_transaction_policy.decoupled", text, "put it behind a model.py that is decoupled")


def shape_tensors(s: Subject) -> Iterator[Problem]:
    for path, text, tensor in s.tensors():
        if tensor.is_shape_tensor:
            yield _not_yet(s, f"{path}.is_shape_tensor", f"is_shape_tensor of {text}")


def non_linear_formats(s: Subject) -> Iterator[Problem]:
    for path, text, tensor in s.tensors():
        if tensor.is_non_linear_format_io:
            yield _not_yet(s, f"{path}.is_non_linear_format_io", f"is_non_linear_format_io of {text}")


def namespaces(s: Subject) -> Iterator[Problem]:
    for index, step in enumerate(s.message.ensemble_scheduling.step):
        if step.model_namespace:
            path = f"ensemble_scheduling.step[{index}].model_namespace"
            yield _not_yet(s, path, f"model_namespace of step {index}")


def operations(s: Subject) -> Iterator[Problem]:
    if s.message.model_operations.op_library_filename:
        yield _not_yet(s, "model_operations", "model_operations (custom operators)")


def agents(s: Subject) -> Iterator[Problem]:
    """An agent may verify a checksum or decrypt: left out, the model would be another one."""
    if s.message.model_repository_agents.agents:
        yield _not_yet(s, "model_repository_agents", "model_repository_agents")


def places(s: Subject) -> Iterator[Problem]:
    value = s.message.parameters["execution"].string_value if "execution" in s.message.parameters else ""
    if value == "ray":
        yield _not_yet(s, "parameters[execution]", 'execution "ray"', 'use "process", "thread", "inline" or "auto"')


UNSUPPORTED: Final[Mapping[str, Rule]] = {
    "N2": decoupled,
    "N13": shape_tensors,
    "N14": non_linear_formats,
    "N17": namespaces,
    "N18": operations,
    "N19": agents,
    "N21": places,
}
BACKEND_RULE: Final = "N22"


def refuse_backend(s: Subject, available: frozenset[str]) -> Iterator[Problem]:
    """Backends of Triton's that nobody has installed here, each with what to do instead."""
    backend = s.message.backend
    if backend in OTHER_BACKENDS and backend not in available:
        path = "backend" if "backend" in s.source.places else "platform"
        label = s.message.platform or backend
        yield Problem(
            f"model '{s.message.name}': {label} {YET}", s.source.place(path), BACKEND_RULE, OTHER_BACKENDS[backend]
        )
