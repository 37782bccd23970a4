"""Factory for Python models: completion of the configuration, loading, and the instances of a version.

Decides which class of instance runs a model, where its code is executed to complete its configuration, and which parts
of that completion are accepted. Each instance imports the code for itself. It does not know how a batch runs.

Callers: the registry; a worker process calls `instance_here` and `completed_here` by their entry points.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from flowserve.backends.base import ModelFiles, Remote
from flowserve.backends.python.instance import IterativeInstance, PythonInstance
from flowserve.backends.python.pb_utils import triton_python_backend_utils as pb_utils
from flowserve.backends.python.pb_utils.context import Code
from flowserve.backends.python.source import CLASS, MODEL_FILE, ModelSource, code_in, forget_model
from flowserve.config.types import Completion, InstanceGroup, ModelConfig
from flowserve.errors import Invalid
from flowserve.graph.transfers import stays_on_device
from flowserve.memory.devices import devices
from flowserve.values import DType, TensorSpec

# Names whose use may block: such a model does not run on the event loop by measurement.
_BLOCKING_NAMES: Final = ("InferenceRequest", "load_model")
_INT32_END: Final = 2**31
_INT64_END: Final = 2**63
_BY_CONFIG_NAME: Final = {dtype.config_name: dtype for dtype in DType}


class PythonBackend:
    """The backend. A version is a folder with model.py and the files that it imports from there."""

    name = "python"
    default_filename = MODEL_FILE
    default_instance_count = 1
    gpu_instance_count = 1

    def complete(self, config: ModelConfig, files: ModelFiles) -> Completion:
        """The fields that the model's `auto_complete_config` adds. A model without one is not imported."""
        return self.complete_by(config, files, lambda remote: completed_here(*remote.arguments))

    def complete_by(self, config: ModelConfig, files: ModelFiles, run: Callable[[Remote], Any]) -> Completion:
        """As `complete`, but the model is imported within `run`."""
        if "auto_complete_config" not in ModelSource(config, files).text():
            return Completion()
        written = run(Remote(f"{__name__}:completed_here", (config, files)))
        return Completion() if written is None else completion_from(config, written)

    def verify(self, config: ModelConfig, files: ModelFiles) -> None:
        """Raises if the file is not valid Python, or does not mention the class or `execute`. It is not imported."""
        source = ModelSource(config, files)
        text = source.text()
        if CLASS not in text and "import *" not in text:
            raise source.no_class()
        source.check_execute(text)

    def load(self, config: ModelConfig, files: ModelFiles, options: Mapping[str, str]) -> PythonModel:
        """Instances may run on the event loop only if the option `execution` allows it."""
        strict_outputs = options.get("strict_outputs") == "true"
        code = code_in(files.folder, files.version_folder)
        source = ModelSource(config, files, code, strict_outputs=strict_outputs)
        text = source.text()
        allowing = ("inline",) if any(name in text for name in _BLOCKING_NAMES) else ("inline", "auto")
        return PythonModel(source, may_run_inline=options.get("execution", "") in allowing)


class PythonModel:
    """One version of a model."""

    is_pure = False

    def __init__(self, source: ModelSource, *, may_run_inline: bool) -> None:
        self.may_run_inline = may_run_inline
        self._source = source

    def instance(self, name: str, group: InstanceGroup) -> PythonInstance:
        if group.kind == "KIND_GPU" and group.gpus and stays_on_device(self._source.config):
            from flowserve.backends.python.device import DevicePythonInstance

            return DevicePythonInstance(self._source, name, group, devices()[group.gpus[0]])
        return _class_for(self._source.config)(self._source, name, group)

    def remote(self, name: str, group: InstanceGroup) -> Remote:
        """Makes the instance in a worker process, where the model cannot break the server."""
        source = self._source
        arguments = (source.config, source.files, name, group, source.context.code, source.strict_outputs)
        return Remote(f"{__name__}:instance_here", arguments)

    def close(self) -> None:
        """No effect: instances share nothing."""


def instance_here(
    config: ModelConfig, files: ModelFiles, name: str, group: InstanceGroup, code: Code, strict_outputs: bool
) -> PythonInstance:
    """The instance that `PythonModel.instance` would make, in a process that runs this model only."""
    source = ModelSource(config, files, code, strict_outputs=strict_outputs)
    return _class_for(config)(source, name, group, owns_process=True)


def _class_for(config: ModelConfig) -> type[PythonInstance]:
    is_iterative = config.sequence is not None and config.sequence.is_iterative
    return IterativeInstance if is_iterative else PythonInstance


def completed_here(config: ModelConfig, files: ModelFiles) -> dict[str, Any] | None:
    """Executes the model's `auto_complete_config` in this process. Returns the configuration that it returns, None if
    the model has no such function.
    """
    source = ModelSource(config, files)
    module = source.import_fresh()
    try:
        function = getattr(source.model_class(module), "auto_complete_config", None)
        if function is None:
            return None
        with source.running("auto_complete_config"):
            answer = function(pb_utils.ModelConfig(json.dumps(config.json)))
    finally:
        forget_model(module)
    if not isinstance(answer, pb_utils.ModelConfig):
        raise Invalid(
            f"auto_complete_config function in model '{config.name}' must return a valid pb.ModelConfig object, "
            f"it returned {type(answer).__name__}"
        )
    return answer.as_dict()


def completion_from(config: ModelConfig, written: Mapping[str, Any]) -> Completion:
    """The fields that the model added to its configuration. Lists of tensors are complete: they include the user's own,
    unchanged. Raises Invalid for values that no configuration can have.
    """
    _check(config, written)
    policy = written.get("model_transaction_policy")
    return Completion(
        inputs=tuple(_spec(config, entry) for entry in written.get("input", ())) or None,
        outputs=tuple(_spec(config, entry) for entry in written.get("output", ())) or None,
        max_batch_size=written.get("max_batch_size") or None,
        dynamic_batching="dynamic_batching" in written and config.dynamic_batching is None,
        decoupled=None if policy is None else bool(policy.get("decoupled", False)),
    )


def _check(config: ModelConfig, written: object) -> None:
    """Check the types of the fields that are read: a model may write anything."""

    def expect(is_right: bool, where: str, found: object, wanted: str) -> None:
        if not is_right:
            raise Invalid(
                f"auto_complete_config function in model '{config.name}': {where} is {found!r:.80} where {wanted} is"
                " expected"
            )

    def integers(where: str, found: object) -> None:
        expect(isinstance(found, list), where, found, "a list of integers")
        for one in found:  # type: ignore[attr-defined]  # it is a list
            expect(type(one) is int and abs(one) < _INT64_END, where, found, "a list of integers")

    expect(isinstance(written, dict), "the configuration", written, "a dictionary")
    fields: dict[str, Any] = written  # type: ignore[assignment]  # it is one
    rows = fields.get("max_batch_size", 0)
    expect(type(rows) is int and 0 <= rows < _INT32_END, "max_batch_size", rows, "an integer from 0 to 2147483647")
    policy = fields.get("model_transaction_policy", {})
    expect(isinstance(policy, dict), "model_transaction_policy", policy, "a dictionary")
    expect(policy.get("decoupled") in (True, False, None), "decoupled", policy.get("decoupled"), "True or False")
    for side in ("input", "output"):
        expect(isinstance(fields.get(side, []), list), side, fields.get(side), "a list")
        for index, entry in enumerate(fields.get(side, [])):
            where = f"{side}[{index}]"
            expect(isinstance(entry, dict), where, entry, "a dictionary")
            for name in ("name", "data_type", "label_filename"):
                expect(_is_text(entry.get(name, "")), f"{where}.{name}", entry.get(name), "text")
            for name in ("optional", "allow_ragged_batch"):
                expect(entry.get(name, False) in (True, False), f"{where}.{name}", entry.get(name), "True or False")
            integers(f"{where}.dims", entry.get("dims", []))
            if entry.get("reshape") is not None:
                expect(isinstance(entry["reshape"], dict), f"{where}.reshape", entry["reshape"], "a dictionary")
                integers(f"{where}.reshape", entry["reshape"].get("shape", []))


def _is_text(found: object) -> bool:
    try:
        return isinstance(found, str) and found.encode() is not None
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def _spec(config: ModelConfig, entry: Mapping[str, Any]) -> TensorSpec:
    dtype = _BY_CONFIG_NAME.get(entry["data_type"])
    if dtype is None:
        raise Invalid(
            f"auto_complete_config function in model '{config.name}': tensor '{entry['name']}' has data type "
            f"'{entry['data_type']}', which is none of {', '.join(_BY_CONFIG_NAME)}"
        )
    reshape = entry.get("reshape")
    return TensorSpec(
        name=entry["name"],
        dtype=dtype,
        dims=tuple(int(dim) for dim in entry["dims"]),
        optional=bool(entry.get("optional", False)),
        ragged=bool(entry.get("allow_ragged_batch", False)),
        reshape=None if reshape is None else tuple(int(dim) for dim in reshape.get("shape", ())),
        labels=entry.get("label_filename", ""),
    )
