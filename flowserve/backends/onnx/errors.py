"""The text of onnxruntime's errors.

Decides which part of it users see: it is shown without its prefixes, source locations and stack. Callers: the modules
of this package.
"""

from __future__ import annotations

import re
from typing import Final

# "/src/graph/model.cc:166 onnxruntime::Model::Model(a, b) const ": a position in onnxruntime's source, of no use to
# users.
_SOURCE_LOCATION: Final = re.compile(
    r"/\S+\.(?:cc|cpp|h|hpp):\d+ [^\n]*?\((?:[^()]|\([^()]*\))*\)(?: const)?(?: \[with [^\]]*\])? "
)


def cleaned(text: str) -> str:
    """onnxruntime's message without its prefixes, source locations and stack."""
    text = text.partition("\nStacktrace")[0]
    text = re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    text = re.sub(r"Load model from .*? failed:", "", text)
    return " ".join(_SOURCE_LOCATION.sub("", text).split())
