"""The operator's placement file: which models run on other machines, and what they need there.

Decides what the file says (`PlacementFile`), with the place of every mistake in it, and the rules P1 to P5 about the
file alone. Rule P6 needs the configurations: which models can run on other machines at all (`why_not_placed`). Rule P7
needs the graphs (segments.py). The syntax is that of configurations (config/). Does not know clusters. Callers: cli/,
wing.py, segments.py.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from flowserve.config.build import MESSAGES, Builder, add_schema
from flowserve.config.parse import SIZE_MAX_BYTES, read_text
from flowserve.config.suggest import did_you_mean
from flowserve.config.syntax import Text, parse_pbtxt
from flowserve.config.types import InstanceGroup, ModelConfig, SourceMap
from flowserve.elsewhere import placement_pb2 as pb
from flowserve.errors import Place, Problem, Problems

add_schema(pb)
PLACEMENT: Final = MESSAGES["placement.Placement"]
AUTO: Final = "auto"
COUNT_MAX: Final = 1024
_ADDRESS: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:/]+):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """Where the instances of one model run. `count` 0: as many as its instance groups say. `path`: of its name in the
    file. `segment`: the segment with whose models it shares its actors, "" for none; they have the same count and
    needs.
    """

    model: str
    count: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    path: str = ""
    segment: str = ""


@dataclass(frozen=True, slots=True)
class PlacementFile:
    """A placement file. `address` is the cluster's, "" if the file has none; `places` are by model. `warnings` are
    about values that do not count.
    """

    source: SourceMap
    address: str = ""
    places: Mapping[str, ModelPlace] = field(default_factory=dict)
    warnings: tuple[Problem, ...] = ()


def read_placement(path: Path) -> PlacementFile:
    """The file at `path`. Raises Problems with all mistakes, each with its line and column."""
    return parse_placement(read_text(path, path.name), path.name)


def parse_placement(text: str, file: str) -> PlacementFile:
    """As `read_placement`, of a file's text."""
    if len(text) > SIZE_MAX_BYTES:
        raise Problems([Problem("too large for a placement file", Place(file, 1, 1))])
    source = Text(text, file)
    builder = Builder(source, "pbtxt")
    message = pb.Placement()
    builder.fill(message, PLACEMENT, parse_pbtxt(source))
    places = SourceMap(file, builder.places)
    problems = [*builder.problems, *_violations(message, places)]
    if problems:
        raise Problems(sorted(dict.fromkeys(problems), key=lambda problem: problem.place or Place(file)))
    by_model = {place.model: place for place in _places(message)}
    return PlacementFile(places, message.cluster.address, by_model, tuple(builder.warnings))


def _places(message: pb.Placement) -> Iterator[ModelPlace]:
    """Of every model that is named, as often as it is."""
    for i, one in enumerate(message.place):
        yield ModelPlace(one.model, one.count, dict(one.resources), dict(one.labels), f"place[{i}].model")
    for i, segment in enumerate(message.segment):
        for j, model in enumerate(segment.models):
            path = f"segment[{i}].models[{j}]"
            needs = dict(segment.resources), dict(segment.labels)
            yield ModelPlace(model, segment.count, *needs, path, segment.name)


def _violations(message: pb.Placement, source: SourceMap) -> Iterator[Problem]:
    address = message.cluster.address
    found = _ADDRESS.fullmatch(address)
    if address and address != AUTO and (found is None or not 0 < int(found[2]) < 65536):
        hint = f'it is the head node\'s, as "10.0.0.1:6379", or "{AUTO}" for the cluster that runs on this machine'
        yield Problem(f'the address of the cluster is "{address}"', source.place("cluster.address"), "P1", hint)
    yield from _placed_again(message, source)
    for i, one in enumerate(message.place):
        here = f"place[{i}]"
        if not one.model:
            yield Problem("a place without a model", source.place(here), "P2", 'write model: "NAME"')
        yield from _needs(one, ("instance", f"model '{one.model}'"), here, source)
    for i, segment in enumerate(message.segment):
        here, what = f"segment[{i}]", f"segment '{segment.name}'"
        if not segment.name:
            yield Problem("a segment without a name", source.place(here), "P2", 'write name: "NAME"')
        nameless = [f"{here}.models[{j}]" for j, model in enumerate(segment.models) if not model]
        for path in nameless if segment.models else [here]:
            hint = 'write models: [ "NAME", "NAME" ]'
            yield Problem(f"{what} without a model", source.place(path), "P2", hint)
        if not segment.count:
            hint = "write count: 1, or how many processes run it"
            yield Problem(f"0 processes of {what}", source.place(f"{here}.count"), "P4", hint)
        yield from _needs(segment, ("process", what), here, source)


def _placed_again(message: pb.Placement, source: SourceMap) -> Iterator[Problem]:
    """The violations of P3."""
    places = [place for place in _places(message) if place.model]
    times = Counter(place.model for place in places)
    seen: set[str] = set()
    for place in places:
        if place.model in seen:
            text = f"model '{place.model}' is placed {times[place.model]} times"
            yield Problem(
                text, source.place(place.path), "P3", "write one place with a count, or name it in one segment"
            )
        seen.add(place.model)
    names = [segment.name for segment in message.segment]
    for i, name in enumerate(names):
        if name and name in names[:i]:
            text = f"segment '{name}' is placed {names.count(name)} times"
            yield Problem(text, source.place(f"segment[{i}].name"), "P3", "give each segment a name of its own")


def _needs(one: pb.Place | pb.Segment, what: tuple[str, str], here: str, source: SourceMap) -> Iterator[Problem]:
    """The violations of P4 and P5 in one entry. `what`: the unit that is counted, and its model or segment, for
    messages.
    """
    each, of = what
    if one.count > COUNT_MAX:
        many = "processes" if each == "process" else "instances"
        text = f"{one.count} {many} of {of}"
        yield Problem(text, source.place(f"{here}.count"), "P4", f"{COUNT_MAX} are the most")
    for name, amount in one.resources.items():
        if not (math.isfinite(amount) and amount > 0):
            text = f"each {each} of {of} needs {amount:g} of resource '{name}'"
            yield Problem(text, source.place(f"{here}.resources[{name}]"), "P5", "an amount is more than 0")
    for field_name, found in (("resources", one.resources), ("labels", one.labels)):
        if "" in found:
            text = f"{field_name} of {of} have an entry without a key"
            yield Problem(text, source.place(f"{here}.{field_name}[]"), "P5")


def misplaced(placement: PlacementFile, configs: Mapping[str, ModelConfig]) -> Iterator[Problem]:
    """The violations of P6: models that do not exist among these, or cannot run on another machine."""
    for model, place in placement.places.items():
        where = placement.source.place(place.path)
        if model not in configs:
            yield Problem(f"model '{model}' is not in the repository", where, "P6", did_you_mean(model, configs))
        elif why := why_not_placed(configs[model]):
            yield Problem(why, where, "P6")


def placed_configs(placement: PlacementFile, configs: Mapping[str, ModelConfig]) -> dict[str, ModelConfig]:
    """The configurations for pictures: with the number of instances and the place of each model that the file names."""
    found = dict(configs)
    for model, place in placement.places.items():
        config = configs.get(model)
        if config is None:
            continue
        needs = [f"{name} {amount:g}" for name, amount in place.resources.items()]
        needs += [f"{name}={value}" for name, value in place.labels.items()]
        where = f"other machines in segment {place.segment}" if place.segment else "other machines"
        where = f"{where}: {', '.join(needs)}" if needs else where
        groups = (InstanceGroup(model, count=place.count),) if place.count else config.instance_groups
        found[model] = replace(config, placed=where, segment=place.segment, instance_groups=groups)
    return found


def why_not_placed(config: ModelConfig) -> str:
    """Why a model cannot run on another machine, "" if it can."""
    what = ""
    if config.is_ensemble:
        return f"'{config.name}' is an ensemble, which is not placed itself: place the models of its steps"
    if config.backend in ("callable", "remote"):
        what = "runs on another server already" if config.backend == "remote" else "is a function, which has no files"
    elif any(group.rate_limiter.resources for group in config.instance_groups):
        what = "uses resources of the rate limiter, which are those of this server"
    return f"model '{config.name}' {what}: it cannot run on another machine" if what else ""
