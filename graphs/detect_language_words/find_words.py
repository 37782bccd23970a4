"""Writes 1/words.txt: the words of each language that no other language has.

    python graphs/detect_language_words/find_words.py

Decided here: words come from the frequent words and the training sentences of `detect_language_classify`, and a word
of two languages says nothing. The held-out sentences are counted at the end, and not used.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import types
from pathlib import Path

HOME = Path(__file__).resolve().parent
SOURCE = HOME.parent / "detect_language_classify"
HELD_OUT = 8  # as SOURCE/train.py
WORD = re.compile(r"[^\W\d_]+")


def lines_of(file: str) -> dict[str, list[str]]:
    """The lines of each language in a file of `detect_language_classify`."""
    found: dict[str, list[str]] = {}
    language = ""
    for line in (SOURCE / file).read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            name, _, rest = line.partition("]")
            language = name.strip("[]")
            line = rest.strip()
        if line and not line.startswith("#"):
            found.setdefault(language, []).append(line)
    return found


def own_words() -> dict[str, list[str]]:
    """The words that only one language has, by language."""
    sentences, frequent = lines_of("sentences.txt"), lines_of("words.txt")
    texts = {name: [*lines[:-HELD_OUT], *frequent[name]] for name, lines in sentences.items()}
    words = {name: {word for line in lines for word in WORD.findall(line.lower())} for name, lines in texts.items()}
    shared = [word for own in words.values() for word in own]
    return {name: sorted(word for word in own if shared.count(word) == 1) for name, own in words.items()}


def main() -> None:
    words = own_words()
    text = "".join(f"{name} {' '.join(own)}\n" for name, own in words.items())
    (HOME / "1/words.txt").write_text(text, encoding="utf-8")
    sys.modules.setdefault("triton_python_backend_utils", types.ModuleType("triton_python_backend_utils"))
    spec = importlib.util.spec_from_file_location("words", HOME / "1/model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.TritonPythonModel()
    model.initialize({})
    sure = right = total = 0
    for name, lines in lines_of("sentences.txt").items():
        for line in lines[-HELD_OUT:]:
            counts = model.counts(line)
            total += 1
            if max(counts) >= module.ENOUGH and sorted(counts)[-2] == 0:
                sure += 1
                right += model.languages[counts.index(max(counts))].decode() == name
    print(f"certain of {sure} of {total} held-out sentences, {right} of them right")


if __name__ == "__main__":
    main()
