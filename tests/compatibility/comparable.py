"""Which models of a repository two servers can be compared on.

Decides the reasons why not: fields that only flowserve reads, and ONNX files that need the backend itself because a
Python model gets neither batch inputs nor states. Ensembles of such models are left out too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from flowserve.config.model_config_pb2 import ModelConfig
from tests.compatibility.configs import read_config
from tests.compatibility.repositories import model_folders

FIRST_OWN_FIELD = 1000


def reasons_not_to_compare(repository: Path, run_in_python: Collection[str]) -> dict[str, str]:
    """The reason for each model that is left out. `run_in_python`: the models whose ONNX files Triton runs so."""
    configs = {model.name: read_config(model) or ModelConfig() for model in model_folders(repository)}
    reasons = {}
    for name, config in configs.items():
        if any(number >= FIRST_OWN_FIELD for number in _field_numbers(config)):
            reasons[name] = "fields that only flowserve reads"
        elif name in run_in_python and _needs_its_backend(config):
            reasons[name] = "batch inputs or states need Triton's onnxruntime backend"
    while True:
        more = {
            name: f"its step {step.model_name} is not compared"
            for name, config in configs.items()
            for step in config.ensemble_scheduling.step
            if name not in reasons and step.model_name in reasons
        }
        if not more:
            return reasons
        reasons |= more


def _needs_its_backend(config: ModelConfig) -> bool:
    ragged = any(one.allow_ragged_batch or one.optional for one in config.input)
    return bool(config.batch_input or config.batch_output or config.sequence_batching.state or ragged)


def _field_numbers(message: Any) -> Iterator[int]:
    for field, value in message.ListFields():
        yield field.number
        parts = value.values() if isinstance(value, dict) or hasattr(value, "keys") else value
        for part in parts if isinstance(parts, Collection) and not isinstance(parts, str | bytes) else [parts]:
            if hasattr(part, "ListFields"):
                yield from _field_numbers(part)
