"""What one server shows of a repository: its index, and each model's metadata, configuration, answers and counts.

Decides the order of the requests, that each is sent twice, so that models whose answers vary are known, and that a
server that has died is asked no more. Does not compare.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.compatibility.ask import NO_ANSWER, Answer, Client
from tests.compatibility.requests import Question, questions, sequence_parameters
from tests.compatibility.servers import Addresses

MODELS_MAX = 200
COUNTED_AFTER_S = 0.3  # Triton counts a request after its response


@dataclass(slots=True)
class Model:
    """`answers`: for each request its two answers. `reason` is the index's, if the model does not serve."""

    ready: bool
    reason: str = ""
    metadata: Any = None
    config: Any = None
    answers: dict[str, tuple[Answer, Answer]] = field(default_factory=dict)
    counts: Any = None


@dataclass(slots=True)
class Observed:
    """`died_at`: the request during which the server ended; `failure`: why it did not start."""

    models: dict[str, Model] = field(default_factory=dict)
    index: list[dict[str, Any]] = field(default_factory=list)
    failure: str = ""
    died_at: str = ""


def observe(addresses: Addresses, asked: Mapping[str, Sequence[Question]] | None = None) -> Observed:
    """Ask a server for everything. `asked`: the requests of each model; by default those that its metadata suggest."""
    seen = Observed()
    client = Client(addresses)
    try:
        seen.index = client.index()
        for entry in sorted(seen.index, key=lambda one: one["name"])[:MODELS_MAX]:
            ready = entry.get("state") == "READY"
            model = seen.models.setdefault(entry["name"], Model(ready))
            model.ready |= ready
            model.reason = model.reason or entry.get("reason", "")
        for name, model in seen.models.items():
            if model.ready:
                model.metadata = client.get(f"/v2/models/{name}")[1]
                model.config = client.get(f"/v2/models/{name}/config")[1]
        of_each = requests_of(seen) if asked is None else asked
        for name, model in seen.models.items():
            if model.ready and not _ask(client, name, model, of_each.get(name, ()), seen):
                return seen
        time.sleep(COUNTED_AFTER_S)
        for name, model in seen.models.items():
            if model.ready:
                model.counts = _counts(client.get(f"/v2/models/{name}/stats")[1])
    finally:
        client.close()
    return seen


def requests_of(seen: Observed) -> dict[str, list[Question]]:
    """The requests that the metadata of one server suggest."""
    configs = {name: model.config for name, model in seen.models.items() if isinstance(model.config, dict)}
    return {
        name: questions(seen.models[name].metadata, config, sequence_parameters(name, configs))
        for name, config in configs.items()
    }


def _ask(client: Client, name: str, model: Model, asked: Sequence[Question], seen: Observed) -> bool:
    """False if the server has died."""
    for question in asked:
        first = client.ask(question)
        if first.status == NO_ANSWER and not client.is_live():
            seen.died_at = f"{name}, {question.name}"
            return False
        if first.status == NO_ANSWER:  # the next one would wait as long
            model.answers[question.name] = first, first
            break
        model.answers[question.name] = first, client.ask(question)
    return True


def _counts(stats: Any) -> Any:
    """The statistics without times and without what flowserve adds."""
    if isinstance(stats, list):
        return [_counts(one) for one in stats]
    if not isinstance(stats, dict):
        return stats
    left_out = {"ns", "last_inference", "flowserve", "memory_usage"}
    return {key: _counts(value) for key, value in stats.items() if key not in left_out}
