"""What a rule looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from flowserve.config.instances import NO_GPUS, Gpus
from flowserve.config.model_config_pb2 import ModelConfig as ModelConfigProto
from flowserve.config.model_config_pb2 import ModelInput, ModelOutput
from flowserve.config.types import SourceMap
from flowserve.errors import Problem


@dataclass(frozen=True, slots=True)
class Subject:
    """One configuration under test: names filled in, completed from the model's files, defaults not yet applied.

    `name` is the model's folder's name, `message.name` what the file calls it. `gpus` are those that there are;
    `uses_gpus`: the model's backend can do something with one.
    """

    message: ModelConfigProto
    source: SourceMap
    name: str
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

    def problem(self, path: str, message: str, hint: str = "") -> Problem:
        return Problem(message, self.source.place(path), hint=hint)

    def escapes(self, *parts: str) -> str:
        """Why the path made of `parts` does not lead to a place inside the model's folder; "" where it does."""
        try:
            home = self.folder.resolve()
            leads_out = not home.joinpath(*parts).resolve().is_relative_to(home)
        except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a zero byte
            return f"cannot be followed: {error}" if isinstance(error, ValueError) else "is a loop of links"
        return "leads out of the model's folder" if leads_out else ""


ENSEMBLE = "ensemble"
Rule = Callable[[Subject], Iterator[Problem]]
