"""Compare what two servers showed of one repository.

Decides what counts as equal: numbers within a tolerance, the beginning of error texts, shapes alone where a model's
answers vary. NORMALISED lists what is left out. Does not know which differences are documented.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.compatibility.ask import Answer, Output, Response
from tests.compatibility.observe import Model, Observed

NORMALISED = (
    "the order of a JSON object's fields",
    "the order of an ensemble's outputs",
    "paths of folders, ids of requests, stacks and Python's versions of one message in error texts",
    "statistics: times, the object `flowserve`, models with warm-up requests, repositories with failed requests",
    "64-bit numbers of gRPC's messages: text or number",
    "configuration of a model whose ONNX file a Python model runs on Triton: all but its tensors",
)
OF_ANY_BACKEND = ("name", "max_batch_size", "input", "output")
TEXT_COMPARED = 160
SHOWN_BEFORE = 60
RELATIVE_TOLERANCE = 1e-4
ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference in one line. `model` is empty if it is the repository's."""

    model: str
    subject: str
    flowserve: str
    triton: str

    def __str__(self) -> str:
        return f"{self.model or 'repository'}: {self.subject}: flowserve {self.flowserve}, Triton {self.triton}"


def differences(
    ours: Observed, theirs: Observed, run_in_python: Collection[str] = (), left_out: Collection[str] = ()
) -> list[Difference]:
    """All differences. `run_in_python`: the models that Triton ran with another backend; `left_out`: not compared."""
    if ours.failure or theirs.failure:
        shown = [Difference("", "start", ours.failure or "started", theirs.failure or "started")]
        return [] if ours.failure and theirs.failure else shown
    found = []
    if bool(ours.died_at) != bool(theirs.died_at):
        found.append(Difference("", "server", _death(ours), _death(theirs)))
    for name in sorted((ours.models.keys() | theirs.models.keys()) - set(left_out)):
        our, their = ours.models.get(name), theirs.models.get(name)
        if our is None or their is None:
            shown_states = [ABSENT if one is None else _state(one) for one in (our, their)]
            found.append(Difference(name, "index", *shown_states))
            continue
        if our.ready != their.ready:
            found.append(Difference(name, "ready", _state(our), _state(their)))
        elif our.ready:
            found += _deep(name, "index", *(_versions(name, seen) for seen in (ours, theirs)))
            found += _of_model(name, our, their, name in run_in_python)
        else:
            found += _texts(name, "reason of the failed load", our.reason, their.reason)
    if _all_succeeded(ours) and _all_succeeded(theirs) and not left_out:
        found += _of_counts(ours, theirs)
    return found


def _of_model(name: str, ours: Model, theirs: Model, other_backend: bool) -> Iterator[Difference]:
    metadata, configs = [ours.metadata, theirs.metadata], [ours.config, theirs.config]
    if other_backend:
        metadata = [{key: value for key, value in one.items() if key != "platform"} for one in metadata]
        configs = [{key: one[key] for key in OF_ANY_BACKEND if key in one} for one in configs]
    yield from _deep(name, "metadata", *metadata)
    yield from _deep(name, "config", *configs)
    is_ensemble = ours.config.get("platform") == "ensemble"
    for question, answers in ours.answers.items():
        if question in theirs.answers:
            yield from _of_answers(name, question, answers, theirs.answers[question], is_ensemble)


def _all_succeeded(seen: Observed) -> bool:
    """Whether all models serve and all requests were answered; the counts of others are not compared."""
    answers = [answer for model in seen.models.values() for pair in model.answers.values() for answer in pair]
    return all(model.ready for model in seen.models.values()) and all(answer.is_success for answer in answers)


def _of_counts(ours: Observed, theirs: Observed) -> Iterator[Difference]:
    for name, our in ours.models.items():
        if name in theirs.models and our.config and not our.config.get("model_warmup"):
            yield from _deep(name, "statistics", our.counts, theirs.models[name].counts)


def _of_answers(
    name: str, question: str, ours: tuple[Answer, Answer], theirs: tuple[Answer, Answer], any_order: bool
) -> Iterator[Difference]:
    our, their = ours[0], theirs[0]
    if our.status != their.status:
        yield Difference(
            name, f"{question}: status", f"{our.status} {_cut(our.error)}", f"{their.status} {_cut(their.error)}"
        )
        return
    yield from _texts(name, f"{question}: error", our.error, their.error)
    if len(our.responses) != len(their.responses) and bool(our.error) == bool(their.error):
        after = " after an error" if our.error else ""
        yield Difference(name, f"{question}: responses{after}", str(len(our.responses)), str(len(their.responses)))
    varies = any(_values_vary(*pair) for pair in (ours, theirs))
    for i, (one, other) in enumerate(zip(our.responses, their.responses, strict=False)):
        subject = f"{question}: response {i}" if len(our.responses) > 1 else question
        yield from _of_responses(name, subject, one, other, varies, any_order)


def _of_responses(
    name: str, subject: str, ours: Response, theirs: Response, varies: bool, any_order: bool
) -> Iterator[Difference]:
    if not (varies and not ours.outputs):  # over `generate` the values are fields
        yield from _deep(name, subject, ours.fields, theirs.fields)
    names = [[one.name for one in response.outputs] for response in (ours, theirs)]
    if sorted(names[0]) != sorted(names[1]) or (not any_order and names[0] != names[1]):
        yield Difference(name, f"{subject}: outputs", str(names[0]), str(names[1]))
    other = {one.name: one for one in theirs.outputs}
    for output in ours.outputs:
        if output.name in other:
            yield from _of_outputs(name, f"{subject}: {output.name}", output, other[output.name], varies)


def _of_outputs(name: str, subject: str, ours: Output, theirs: Output, varies: bool) -> Iterator[Difference]:
    shown = [f"{one.data_type} {list(one.array.shape)}" for one in (ours, theirs)]
    if shown[0] != shown[1]:
        yield Difference(name, f"{subject}: shape", *shown)
    elif not varies and not _equal(ours.array, theirs.array):
        yield Difference(
            name, f"{subject}: values", *_around(*(str(one.array.ravel()[:64].tolist()) for one in (ours, theirs)))
        )


def _values_vary(first: Answer, second: Answer) -> bool:
    """Whether two answers to one request to one server differ in their values."""
    for one, other in zip(first.responses, second.responses, strict=False):
        if not one.outputs and one.fields != other.fields:
            return True
        for a, b in zip(one.outputs, other.outputs, strict=False):
            if a.array.shape != b.array.shape or not _equal(a.array, b.array):
                return True
    return False


def _equal(ours: Any, theirs: Any) -> bool:
    if ours.dtype == object or theirs.dtype == object:
        texts = [[_text(value) for value in array.ravel().tolist()] for array in (ours, theirs)]
        return texts[0] == texts[1]
    return bool(np.allclose(ours, theirs, rtol=RELATIVE_TOLERANCE, atol=1e-6, equal_nan=True))


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _texts(name: str, subject: str, ours: str, theirs: str) -> Iterator[Difference]:
    """The beginning of Triton's text has to be that of flowserve's, which may go on."""
    start = normalised(theirs)[:TEXT_COMPARED]
    if not normalised(ours).startswith(start) or bool(ours) != bool(theirs):
        yield Difference(name, subject, repr(_cut(ours)), repr(_cut(theirs)))


def normalised(text: str) -> str:
    """An error text without what differs for a reason."""
    text = re.sub(r"\[request id: [^\]]*\] ", "", text)
    text = re.sub(r"(\\n|\n){2}At:.*", "", text, flags=re.DOTALL)
    text = text.replace("for model instance '", "for model '")  # as in later versions of Triton
    text = re.sub(r"/[\w./-]*/(?=[\w.-]+)", "", text)
    return re.sub(r"\s+", " ", text).strip()


def _deep(name: str, subject: str, ours: Any, theirs: Any) -> Iterator[Difference]:
    """The differences of two JSON values, each with its path."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for key in [*theirs, *(key for key in ours if key not in theirs)]:
            yield from _deep(name, f"{subject}.{key}", ours.get(key, ABSENT), theirs.get(key, ABSENT))
    elif _is_list(ours) and _is_list(theirs) and len(ours) == len(theirs):
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from _deep(name, f"{subject}[{i}]", one, other)
    elif not _same(ours, theirs):
        yield Difference(name, subject, *_around(str(ours), str(theirs)))


def _same(ours: Any, theirs: Any) -> bool:
    if type(ours) is float or type(theirs) is float:
        return (
            isinstance(ours, int | float)
            and isinstance(theirs, int | float)
            and bool(np.isclose(ours, theirs, equal_nan=True))
        )
    return bool(ours == theirs) and type(ours) is type(theirs)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _versions(name: str, seen: Observed) -> dict[str, str]:
    """The states of a model's versions in the index."""
    return {one.get("version", "no version"): one.get("state", ABSENT) for one in seen.index if one["name"] == name}


def _state(model: Model) -> str:
    return "ready" if model.ready else f"not ready ({_cut(model.reason) or 'no reason'})"


def _death(seen: Observed) -> str:
    return f"ended at the request {seen.died_at}" if seen.died_at else "served to the end"


def _around(ours: str, theirs: str) -> tuple[str, str]:
    """Two texts, of long ones the part around the first place where they differ."""
    place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), 0)
    start = max(0, place - SHOWN_BEFORE)
    shown = [_cut(("…" if start else "") + text[start:]) for text in (ours, theirs)]
    return shown[0], shown[1]


def _cut(text: str, length: int = 200) -> str:
    text = re.sub(r"\s+", " ", text)
    return text if len(text) <= length else f"{text[:length]}…"
