"""Keys of `parameters {}` that flowserve itself reads: admission limits, Python environments, CPU inputs.

Decides the names of these parameters and their valid values. Does not know their effect (`runtime/admission`,
`repository/read`). Callers: `rules`, `ignored`, `repository`, `runtime`, test tools.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

FORCE_CPU: Final = "FORCE_CPU_ONLY_INPUT_TENSORS"  # a parameter of Triton's Python backend
ENVIRONMENT: Final = "EXECUTION_ENV_PATH"
MODEL_FOLDER: Final = "$$TRITON_MODEL_DIRECTORY"
# Files at the top level of an environment: of venv and of conda.
MARKS: Final = ("pyvenv.cfg", "conda-meta")
WAIT: Final = "wait"
REJECT: Final = "reject"
ANSWER_AT_TIMEOUT: Final = "answer_at_timeout"
_NUMBERS: Final = ("deadline_ms", "max_requests", "max_request_bytes")
ADMISSION_KEYS: Final = (*_NUMBERS, "when_full", ANSWER_AT_TIMEOUT)


@dataclass(frozen=True, slots=True)
class AdmissionOptions:
    """Admission limits of one deployment; 0 means no limit. `waits`: a request over the limit waits instead of being
    refused. `answers_at_timeout`: the timeout of a request is a deadline, which ends it wherever it is; otherwise a
    timeout only limits how long the request waits in a queue.
    """

    deadline_ms: int = 0
    max_requests: int = 0
    max_request_bytes: int = 0
    waits: bool = False
    answers_at_timeout: bool = False

    @property
    def is_unlimited(self) -> bool:
        """Whether there is neither a limit nor a deadline."""
        return not (self.deadline_ms or self.max_requests or self.max_request_bytes or self.answers_at_timeout)


def parameter_error(key: str, value: str) -> str:
    """The expected value of parameter `key` if `value` is invalid, else ""."""
    if key in _NUMBERS and not re.fullmatch(r"[1-9][0-9]{0,17}", value, re.ASCII):
        return "expected a whole number, 1 or more"
    if key == "when_full" and value not in (WAIT, REJECT):
        return f"expected {REJECT} or {WAIT}"
    if key == ANSWER_AT_TIMEOUT and value not in ("true", "false"):
        return "expected true or false"
    return ""


def admission_options(parameters: Mapping[str, str], *, answers_at_timeout: bool = False) -> AdmissionOptions:
    """The limits from valid parameters. `answers_at_timeout`: the default."""
    numbers = {key: int(parameters[key]) for key in _NUMBERS if key in parameters}
    answers = parameters.get(ANSWER_AT_TIMEOUT, str(answers_at_timeout).lower()) == "true"
    return AdmissionOptions(**numbers, waits=parameters.get("when_full") == WAIT, answers_at_timeout=answers)
