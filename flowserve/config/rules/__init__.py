"""Rules for a single configuration: each function checks one part of it, and yields the violations of numbered rules.

Decides the rules and their numbers, which docs and tests use and which are never reassigned. Every rule always runs, so
that all mistakes of a file are reported at once. Does not know other configurations (`graph/rules`) or the model's own
file (`complete`). Callers: `load`, which lists the rules, and `unsupported`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from flowserve.config.model_config_pb2 import ModelConfig as ModelConfigProto
from flowserve.config.model_config_pb2 import ModelInput, ModelOutput
from flowserve.config.types import NO_GPUS, Gpus, SourceMap
from flowserve.errors import Problem


@dataclass(frozen=True, slots=True)
class RuleInput:
    """One configuration: names filled in, completed from the model's files, defaults not yet applied.

    `message.name` is the name in the file. `gpus` are the available ones; `uses_gpus`: the model's backend can use a
    GPU.
    """

    message: ModelConfigProto
    source: SourceMap
    folder: Path
    gpus: Gpus = NO_GPUS
    uses_gpus: bool = True

    @property
    def is_ensemble(self) -> bool:
        return self.message.platform == ENSEMBLE or self.message.HasField("ensemble_scheduling")

    def tensors(self) -> Iterator[tuple[str, str, ModelInput | ModelOutput]]:
        """(path, "input 'X'", tensor) of every input, then every output."""
        for index, given in enumerate(self.message.input):
            yield f"input[{index}]", f"input '{given.name}'", given
        for index, made in enumerate(self.message.output):
            yield f"output[{index}]", f"output '{made.name}'", made

    def parameter(self, key: str) -> str:
        """The value of a parameter, "" if it is missing."""
        return self.message.parameters[key].string_value if key in self.message.parameters else ""

    def problem(self, rule: str, path: str, message: str, hint: str = "") -> Problem:
        """A violation of rule number `rule` in the field `path`."""
        return Problem(message, self.source.place(path), rule, hint)

    def path_error(self, *parts: str) -> str:
        """The error if the path of `parts` leads out of the model's folder, or cannot be resolved; else ""."""
        try:
            home = self.folder.resolve()
            leads_out = not home.joinpath(*parts).resolve().is_relative_to(home)
        except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a zero byte
            return f"cannot be followed: {error}" if isinstance(error, ValueError) else "is a loop of links"
        return "leads out of the model's folder" if leads_out else ""


ENSEMBLE = "ensemble"
Rule = Callable[[RuleInput], Iterator[Problem]]
