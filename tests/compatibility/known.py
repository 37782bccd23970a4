"""The documented differences: which of those found they explain.

Each names the row of section 3 of docs/from-triton.md by the beginning of its first cell; a test compares them with
the page.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.compatibility.differences import Difference


@dataclass(frozen=True, slots=True)
class Known:
    """`row`: the beginning of the row. The others are regular expressions, found anywhere in their part."""

    row: str
    subject: str
    flowserve: str = ""
    triton: str = ""

    def explains(self, one: Difference) -> bool:
        return all(
            re.search(expression, text, re.DOTALL)
            for expression, text in (
                (self.subject, one.subject),
                (self.flowserve, one.flowserve),
                (self.triton, one.triton),
            )
        )


KNOWN = (
    Known("`generate` for a model that answers none or several times", r"generate(, .*)?: status", r"^400", r"^200"),
    Known(
        "an error of a kind other than `INVALID_ARG` from a model, over `generate`",
        r"generate(_stream)?(, .*)?: status",
        "",
        r"^400",
    ),
    Known("responses that a decoupled model sends after an error", r"stream(, .*)?: responses after an error"),
    Known("`set_dynamic_batching()` of a Python model without a batch", r"config\.dynamic_batching", r"^absent"),
    Known("an ensemble that joins the outputs of a decoupled step", r"ready", r"^ready", r"no reason"),
    Known("the reason of a failed load", r"^reason of the failed load"),
    Known("bytes that are not UTF-8 in a JSON response", r"status$", r"^400 .*not UTF-8", r"^unreadable"),
    Known("an `execute` that returns no response", r"status$", r"returned no InferenceResponse", r"^no answer"),
    Known("a model without a version under its version policy", r"^index$", r"^not ready .*version policy", r"^absent"),
    Known("a folder that is no model", r"^index$", r"^absent", r"^not ready"),
    Known("`[request id: ID]` before an error", r"values$|generate\.", "", r"\[request id: "),
    Known("`triton_dtype()` of a `Tensor`", r"status$", r"^(200|OK)", r"Unable to convert function return value"),
    Known("a class without `execute`", r"^ready$", r"has no method execute", r"^ready"),
    Known(
        "the id of a sequence as a control of type STRING",
        r"status$",
        r"^(200|OK)",
        r"unexpected number of string elem",
    ),
    Known("response statistics of a decoupled `model.py`", r"^statistics\..*\.response_stats\.", "", r"^absent"),
    Known("a tensor of numpy's text type", r"status$", r"^(200|OK)", r"NumPy dtype is not supported"),
    Known(
        "an ensemble's output that is not asked for and that another step reads",
        r"status$",
        r"^(200|OK)",
        r"unexpected deadlock",
    ),
)


def row_of(one: Difference) -> str:
    """The row that explains a difference; empty for one that is not documented."""
    return next((known.row for known in KNOWN if known.explains(one)), "")
