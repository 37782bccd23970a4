"""Makes a backend of a `ContinuousLibrary`: completion, loading, and a process for each engine.

Decides that a model of such a backend is decoupled, is not batched by the server, and has the tensors of its library,
with the dims of its configuration; and that its engine runs in a worker process unless the model says otherwise. It
does not know how requests are computed (instance.py).

Callers: the backends of engines; a worker process calls `instance_here` by its entry point.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from flowserve.backends.base import ModelFiles, Remote
from flowserve.backends.library.backend import PROCESS, require_installed
from flowserve.backends.library.interface import ModelSource
from flowserve.backends.more.continuous.instance import ContinuousInstance
from flowserve.backends.more.continuous.interface import ContinuousLibrary
from flowserve.config.types import Completion, InstanceGroup, ModelConfig
from flowserve.errors import Invalid, Place, Problem, Problems
from flowserve.values import TensorSpec

log = logging.getLogger("flowserve.load")

_ONE_BY_ONE: Final = "its engine batches by itself, and sends responses when it has them"


class ContinuousBackend:
    """The backend of one engine's package."""

    default_instance_count = 1
    gpu_instance_count = 1
    default_execution = PROCESS

    def __init__(self, library: ContinuousLibrary) -> None:
        self.name = library.name
        self.default_filename = library.default_filename
        self._library = library

    def complete(self, config: ModelConfig, files: ModelFiles) -> Completion:
        """All tensors, also for a configuration that names some of them, whose dims it may choose; the package is not
        imported.
        """
        return Completion(
            inputs=_with_dims_of(config.inputs, self._library.inputs),
            outputs=_with_dims_of(config.outputs, self._library.outputs),
            max_batch_size=0,
            decoupled=True,
        )

    def load(self, config: ModelConfig, files: ModelFiles, options: Mapping[str, str]) -> ContinuousModel:
        """Raises Invalid if there is no file, Unsupported if the package is not installed, Problems for the file and
        the configuration.
        """
        source = self._checked(config, files, options)
        for key, why in self._library.ignored.items():
            if key in config.parameters:
                log.warning("model '%s': parameter '%s' is not used: %s", config.name, key, why)
        return ContinuousModel(self._library, source)

    def verify(self, config: ModelConfig, files: ModelFiles) -> None:
        """Raises as `load`."""
        self._checked(config, files, {})

    def _checked(self, config: ModelConfig, files: ModelFiles, options: Mapping[str, str]) -> ModelSource:
        library = self._library
        named = config.default_model_filename or library.default_filename
        try:
            path = files.model_file(replace(config, default_model_filename=named), named)
        except Problems:
            raise
        except Invalid as missing:
            place = Place(files.shown(files.version_folder / named))
            raise Problems([Problem(str(missing), place)]) from None
        source = ModelSource(config, files, path, 1, options)
        library.check(source)
        problems = [*_disagreements(library, config)]
        if problems:
            raise Problems(problems)
        require_installed(library.modules, library.requirement, files, path)
        return source


def _with_dims_of(ours: Sequence[TensorSpec], theirs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The library's tensors with the dims that the configuration gives them. The library reads the elements only."""
    given = {spec.name: spec for spec in ours if spec.dims}
    return tuple(
        replace(spec, dims=given[spec.name].dims, reshape=given[spec.name].reshape) if spec.name in given else spec
        for spec in theirs
    )


def _disagreements(library: ContinuousLibrary, config: ModelConfig) -> list[Problem]:
    """Settings of the configuration that an engine cannot follow."""
    found = []
    if not config.decoupled:
        text = f"model '{config.name}' of backend '{library.name}' is not decoupled: {_ONE_BY_ONE}"
        hint = "write model_transaction_policy { decoupled: true }"
        found.append(Problem(text, config.source.place("model_transaction_policy"), hint=hint))
    if config.max_batch_size:
        text = f"model '{config.name}' of backend '{library.name}' has max_batch_size {config.max_batch_size}"
        hint = f"write max_batch_size: 0; {_ONE_BY_ONE}"
        found.append(Problem(text, config.source.place("max_batch_size"), hint=hint))
    for side, ours, theirs in (
        ("input", config.inputs, library.inputs),
        ("output", config.outputs, library.outputs),
    ):
        known = {spec.name: spec for spec in theirs}
        for index, spec in enumerate(ours):
            place = config.source.place(f"{side}[{index}].name")
            if spec.name not in known and not spec.optional:
                text = f"unexpected inference {side} '{spec.name}', allowed {side}s are: {', '.join(known)}"
                found.append(Problem(text, place))
            elif spec.name in known and spec.dtype is not known[spec.name].dtype:
                text = f"{side} '{spec.name}' of model '{config.name}' has data type {spec.dtype.config_name}"
                found.append(Problem(text, place, hint=f"it is {known[spec.name].dtype.config_name}"))
    return found


class ContinuousModel:
    """One version of a model. Each instance has an engine of its own."""

    is_pure = False  # sampling is random
    may_run_inline = False

    def __init__(self, library: ContinuousLibrary, source: ModelSource) -> None:
        self._library = library
        self._source = source

    def instance(self, name: str, group: InstanceGroup) -> ContinuousInstance:
        return ContinuousInstance(self._library, self._source, group)

    def remote(self, name: str, group: InstanceGroup) -> Remote:
        """Makes the instance in a worker process, which imports the package."""
        return Remote(f"{__name__}:instance_here", (self._library, self._source, group))

    def close(self) -> None:
        """No effect: instances share nothing."""


def instance_here(library: ContinuousLibrary, source: ModelSource, group: InstanceGroup) -> ContinuousInstance:
    """The instance that `ContinuousModel.instance` would make, in a process that runs this model only."""
    return ContinuousInstance(library, source, group, owns_process=True)
