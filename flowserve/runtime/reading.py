"""A repository read without serving it, for those who only look.

Decided here: that reading goes as far as it can: what is wrong with one deployment says nothing about the others; and
that it says nothing about the GPUs of the machine it is read on, which need not be the one it is served on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowserve.backends import registry
from flowserve.config.instances import ASSUMED
from flowserve.config.types import ModelConfig
from flowserve.errors import FlowserveError
from flowserve.render.facts import Facts, gather_facts
from flowserve.repository.layout import find_models
from flowserve.repository.read import ReadModel, read_model
from flowserve.repository.resolve import Resolution, resolve
from flowserve.runtime.completion import complete


@dataclass(frozen=True, slots=True)
class Reading:
    """`configs` are those that are right by themselves; `resolution` says which of them can be served together."""

    configs: Mapping[str, ModelConfig]
    resolution: Resolution
    warnings: tuple[str, ...]

    def facts(self) -> Facts:
        """What pictures say about the models."""
        return gather_facts(self.configs.values())


def read_repositories(repositories: Sequence[Path]) -> Reading:
    """Read and compile everything. Blocks. Raises FlowserveError where a repository itself cannot be read."""
    found = find_models(repositories)
    read: dict[str, ReadModel] = {}
    failed: dict[str, FlowserveError] = dict(found.duplicates)
    for folder in found.folders:
        try:
            model = read_model(folder, registry.default_files(), complete, gpus=ASSUMED)
            if not model.config.is_ensemble:
                registry.find(model.config.backend)  # which says what is wrong where there is none
            read[folder.name] = model
        except FlowserveError as error:
            failed[folder.name] = error
    configs = {name: model.config for name, model in read.items()}
    resolution = resolve(configs, {name: model.versions for name, model in read.items()}, failed)
    warnings = (*found.warnings, *(text for model in read.values() for text in model.warnings))
    return Reading(configs, resolution, warnings)
