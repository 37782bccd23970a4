"""Which versions a load loads anew, after any changes of a model's folder: the loading code against the rule.

The rule, written once more and without digests: all versions are loaded anew if the configuration differs in more than
its version policy or if a shared file differs, otherwise those whose own files differ or that were not served; and a
load with a version that fails changes nothing. The models are Python models on the event loop.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from flowserve.errors import FlowserveError, Invalid
from flowserve.repository.override import Override
from flowserve.runtime.engine.engine import Engine, open_engine
from flowserve.runtime.engine.options import EngineOptions
from flowserve.runtime.loading.control import Control, ControlOptions, open_control
from flowserve.values import Request

VERSIONS = (1, 2, 3)
MODEL = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        if {is_broken}:
            raise RuntimeError("broken")
        self.drawn, self.count = int.from_bytes(os.urandom(6), "big"), 0

    def execute(self, requests):
        self.count += len(requests)
        told = pb_utils.Tensor("OUT", np.array([self.drawn, self.count], np.int64))
        return [pb_utils.InferenceResponse([told]) for _ in requests]
"""
ENSEMBLE = """
platform: "ensemble"
input [ {{ name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }} ]
output [ {{ name: "OUT" data_type: TYPE_INT64 dims: [ 2 ] }} ]
ensemble_scheduling {{ step [ {{
  model_name: "m" model_version: {version}
  input_map {{ key: "IN" value: "IN" }} output_map {{ key: "OUT" value: "OUT" }}
}} ] }}
"""
POLICIES: tuple[dict[str, Any], ...] = (
    {"all": {}},
    {"latest": {"num_versions": 1}},
    {"latest": {"num_versions": 2}},
    {"specific": {"versions": [1, 3]}},
)


@dataclass(frozen=True)
class Config:
    policy: int = 0
    parameter: str = "a"

    def as_json(self) -> dict[str, Any]:
        return {
            "backend": "python",
            "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [1]}],
            "output": [{"name": "OUT", "data_type": "TYPE_INT64", "dims": [2]}],
            "parameters": {
                "execution": {"string_value": "inline"},
                "p": {"string_value": self.parameter},
            },
            "version_policy": POLICIES[self.policy],
        }

    def as_text(self, comment: str) -> str:
        (policy,) = POLICIES[self.policy].items()
        numbers = " ".join(f"{name}: {value}" for name, value in policy[1].items())
        return f"""# {comment}
            version_policy {{ {policy[0]} {{ {numbers} }} }}
            backend: "python"
            input [ {{ name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }} ]
            output [ {{ name: "OUT" data_type: TYPE_INT64 dims: [ 2 ] }} ]
            parameters {{ key: "p" value {{ string_value: "{self.parameter}" }} }}
            parameters {{ key: "execution" value {{ string_value: "inline" }} }}
        """

    def chosen(self, there: Sequence[int]) -> list[int]:
        kind, fields = next(iter(POLICIES[self.policy].items()))
        if kind == "specific":
            return [version for version in there if version in fields["versions"]]
        return sorted(there) if kind == "all" else sorted(there)[-fields["num_versions"] :]


@dataclass
class Folder:
    """The folder as it should be on disk. A version is its tag; a tag below zero fails to load."""

    versions: dict[int, int] = field(default_factory=lambda: {1: 0, 2: 0})
    shared: int = 0
    config: Config = Config()
    comment: str = ""

    def write(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        for version in VERSIONS:
            folder = path / str(version)
            if version not in self.versions:
                for file in folder.iterdir() if folder.exists() else ():
                    file.unlink()
                folder.rmdir() if folder.exists() else None
                continue
            folder.mkdir(exist_ok=True)
            tag = self.versions[version]
            (folder / "model.py").write_text(MODEL.format(is_broken=tag < 0))
            (folder / "weights").write_text(str(tag))
        (path / "shared.txt").write_text(str(self.shared))
        (path / "config.pbtxt").write_text(self.config.as_text(self.comment))
        (path / ".hidden").write_text(os.urandom(4).hex())


tags = st.integers(-1, 3)
changes = st.one_of(
    st.tuples(st.just("put"), st.sampled_from(VERSIONS), tags),
    st.tuples(st.just("put"), st.sampled_from(VERSIONS), tags),
    st.tuples(st.just("remove"), st.sampled_from(VERSIONS), st.just(0)),
    st.tuples(st.just("rename"), st.sampled_from(VERSIONS), st.sampled_from(VERSIONS)),
    st.tuples(st.just("share"), st.integers(0, 1), st.just(0)),
    st.tuples(st.just("policy"), st.integers(0, len(POLICIES) - 1), st.just(0)),
    st.tuples(st.just("parameter"), st.integers(0, 1), st.just(0)),
    st.tuples(st.just("comment"), st.integers(0, 3), st.just(0)),
)
overrides = st.one_of(
    st.none(), st.none(), st.none(), st.builds(Config, st.integers(0, len(POLICIES) - 1), st.sampled_from("ab"))
)
Step = tuple[list[tuple[str, int, int]], Config | None]
steps: st.SearchStrategy[list[Step]] = st.lists(
    st.tuples(st.lists(changes, max_size=3), overrides), min_size=1, max_size=6
)


def change(folder: Folder, what: str, one: int, two: int) -> None:
    if what == "put":
        folder.versions[one] = two
    elif what == "remove":
        folder.versions.pop(one, None)
    elif what == "rename" and one in folder.versions and two not in folder.versions:
        folder.versions[two] = folder.versions.pop(one)
    elif what == "share":
        folder.shared = one
    elif what == "policy":
        folder.config = replace(folder.config, policy=one)
    elif what == "parameter":
        folder.config = replace(folder.config, parameter="ab"[one])
    elif what == "comment":
        folder.comment = str(one)


@dataclass(frozen=True)
class Served:
    """What serves, by the rule."""

    versions: Mapping[int, int]
    shared: int
    parameter: str


def by_the_rule(before: Served, folder: Folder, override: Config | None) -> tuple[Served, set[int]]:
    """What serves after a load, and the versions that were loaded anew."""
    config = override or folder.config
    chosen = config.chosen(sorted(folder.versions))
    is_alike = before.shared == folder.shared and before.parameter == config.parameter
    anew = {one for one in chosen if not is_alike or before.versions.get(one) != folder.versions[one]}
    if not chosen or any(folder.versions[one] < 0 for one in anew):
        return before, set()
    return Served({one: folder.versions[one] for one in chosen}, folder.shared, config.parameter), anew


async def told(engine: Engine, name: str, version: str = "") -> list[int]:
    """The number drawn and the count; [] if it does not serve."""
    try:
        deployment = engine.deployments.find(name, version)
    except FlowserveError:
        return []
    response = await engine.infer(deployment, Request(inputs={"IN": np.zeros(1, np.float32)}))
    return [int(one) for one in response.outputs["OUT"]]


async def load(control: Control, override: Config | None) -> None:
    with suppress(Invalid):  # a version that fails, or no version to serve
        await control.load("m", None if override is None else Override(json.dumps(override.as_json())))


async def play(steps: Sequence[Step]) -> None:
    with tempfile.TemporaryDirectory() as path:
        repository = Path(path)
        folder = Folder()
        folder.write(repository / "m")
        for name, version in (("first", 1), ("newest", -1)):
            (repository / name / "1").mkdir(parents=True)
            (repository / name / "config.pbtxt").write_text(ENSEMBLE.format(version=version))
        options = ControlOptions("explicit", ("m", "first", "newest"))
        async with open_engine(EngineOptions()) as engine, open_control(engine, [repository], options) as control:
            assert await control.start(lambda event: None) == {}
            served = Served(dict(folder.versions), folder.shared, folder.config.parameter)
            before = {version: await told(engine, "m", str(version)) for version in VERSIONS}
            for some, override in steps:
                for one in some:
                    change(folder, *one)
                folder.write(repository / "m")
                deployments = {name: engine.deployments.entries[name].latest for name in ("first", "newest")}
                newest = max(served.versions)
                await load(control, override)
                was, (served, anew) = served, by_the_rule(served, folder, override)
                after = {version: await told(engine, "m", str(version)) for version in VERSIONS}
                for version in VERSIONS:
                    if version not in served.versions:
                        assert after[version] == []
                    elif version in anew:
                        assert after[version][1] == 1
                        assert before[version] == [] or after[version][0] != before[version][0]
                    else:
                        assert after[version] == [before[version][0], before[version][1] + 1]
                rows = {row["version"]: row["state"] for row in engine.deployments.index() if row["name"] == "m"}
                ready = {version for version, state in rows.items() if state == "READY"}
                assert ready == set(map(str, served.versions))
                for name, version, last in (("first", 1, 1), ("newest", max(served.versions), newest)):
                    answer = await told(engine, name)
                    assert answer[:1] == after[version][:1]
                    if answer:
                        after[version] = answer
                    deployment = engine.deployments.entries[name].latest
                    assert (deployment is None) == (version not in served.versions)
                    if deployment is not None:
                        is_same = version == last and version not in anew and version in was.versions
                        assert (deployment is deployments[name]) == is_same
                before = after


@settings(max_examples=settings().max_examples // 2)
@given(steps)
@pytest.mark.fault("C14")
def test_a_load_loads_exactly_the_versions_that_changed(steps: list[Step]) -> None:
    trio.run(play, steps)
