"""Operations in every replica or in none: laws that hold whichever replicas fail, and whichever end meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from flowserve.errors import FlowserveError, Invalid
from flowserve.replicas.link import NOTHING, LinkClosed, Result
from flowserve.replicas.operations import FOLLOW, LOAD, UNLOAD, GroupOperations

FINE, FAILS, RAISES, ENDS, ENDS_LATER = "fine", "fails", "raises", "ends", "ends later"


@dataclass
class FakeLink:
    """The replica's side: what it has in force, and how its part of each operation goes, in order."""

    number: int
    plan: list[str] = field(default_factory=list)
    in_force: set[str] = field(default_factory=set)
    settings: dict[str, Any] = field(default_factory=dict)
    prepared: dict[int, tuple[str, Any]] = field(default_factory=dict)
    is_alive: bool = True

    async def call(self, name: str, arguments: Any = None, data: bytes = b"") -> Result:
        await trio.lowlevel.checkpoint()
        if not self.is_alive:
            raise LinkClosed
        result: Result = getattr(self, name)(arguments)
        await trio.lowlevel.checkpoint()
        return result

    def tell(self, name: str, arguments: Any = None) -> None:
        if self.is_alive:
            getattr(self, name)(arguments)

    def prepare(self, arguments: Sequence[Any]) -> Result:
        number, operation = arguments
        how = self.plan.pop(0) if self.plan else FINE
        if how == ENDS:
            self.is_alive = False
            raise LinkClosed
        if how == RAISES:
            raise Invalid(f"{self.number} cannot read it")
        self.prepared[number] = how, operation
        name = operation["name"]
        return ({name: ["Invalid", f"{self.number} cannot load it"]} if how == FAILS else {}), b""

    def decide(self, arguments: Sequence[Any]) -> Result:
        number, errors, is_dropped = arguments
        how, operation = self.prepared.pop(number)
        if how == ENDS_LATER:
            self.is_alive = False
            raise LinkClosed
        name = operation["name"]
        if is_dropped or name in errors:
            raise Invalid(errors[name][1] if name in errors else "dropped")
        self.in_force.add(name)
        return NOTHING

    def unload(self, operation: Mapping[str, Any]) -> Result:
        self.in_force.discard(operation["name"])
        return NOTHING

    def change(self, change: Sequence[Any]) -> Result:
        name, arguments = change
        how = self.plan.pop(0) if self.plan else FINE
        if how in (FAILS, RAISES):
            raise Invalid(f"{self.number} has no such memory")
        if name == "register":
            self.settings[arguments[0]] = arguments[1]
        else:
            self.settings.pop(arguments[0], None)
        return NOTHING


@dataclass
class FakeMember:
    number: int
    link: Any


def load(name: str) -> dict[str, Any]:
    return {"kind": LOAD, "name": name}


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from([LOAD, UNLOAD]),
            st.lists(st.sampled_from([FINE, FINE, FINE, FAILS, RAISES, ENDS, ENDS_LATER]), min_size=3, max_size=3),
        ),
        max_size=8,
    )
)
def test_all_replicas_that_live_have_the_same_in_force(steps: list[tuple[str, str, list[str]]]) -> None:
    async def main() -> None:
        links = [FakeLink(number) for number in range(3)]
        operations = GroupOperations(lambda: [FakeMember(one.number, one) for one in links if one.is_alive])
        for name, kind, plans in steps:
            living = [one for one in links if one.is_alive]
            before = [{*one.in_force} for one in living]
            for one, how in zip(links, plans, strict=True):
                one.plan = [how]
            raised: FlowserveError | None = None
            try:
                await operations.operate({**load(name), "kind": kind}, b"")
            except FlowserveError as error:
                raised = error
            after = [one for one in living if one.is_alive]
            assert len({frozenset(one.in_force) for one in after}) <= 1
            if raised is not None:
                assert all(one.in_force == was for one, was in zip(living, before, strict=True) if one.is_alive)
            for one in after:
                assert (name in one.in_force) == (kind == LOAD) or raised is not None
                assert not one.prepared
        # A replica that starts now and repeats what is remembered has the same.
        fresh: set[str] = set()
        for _, operation, _ in operations.after(0)[0]:
            (fresh.add if operation["kind"] == LOAD else fresh.discard)(operation["name"])
        for one in links:
            if one.is_alive:
                assert one.in_force == fresh

    trio.run(main)


async def test_loads_follow_each_other_and_an_unload_waits_for_none() -> None:
    order: list[str] = []
    release = trio.Event()

    class Slow(FakeLink):
        async def call(self, name: str, arguments: Any = None, data: bytes = b"") -> Result:
            order.append(name)
            if name == "prepare" and arguments[1]["name"] == "hangs":
                await release.wait()
            return await super().call(name, arguments, data)

    link = Slow(0)
    operations = GroupOperations(lambda: [FakeMember(0, link)])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(operations.operate, load("hangs"), b"")
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(operations.operate, load("next"), b"")
        await operations.operate({"kind": UNLOAD, "name": "hangs"}, b"")
        assert order == ["prepare", "unload"]
        release.set()
    assert order == ["prepare", "unload", "decide", "prepare", "decide"]


async def test_a_change_that_one_replica_refuses_is_taken_back_by_the_others() -> None:
    links = [FakeLink(0), FakeLink(1), FakeLink(2, [FAILS])]
    operations = GroupOperations(lambda: [FakeMember(one.number, one) for one in links])
    with pytest.raises(Invalid, match="2 has no such memory"):
        await operations.change(0, "register", ["region", "/key"])
    assert [one.settings for one in links] == [{}, {}, {}]
    await operations.change(0, "register", ["region", "/key"])
    assert [one.settings for one in links] == [{}, {"region": "/key"}, {"region": "/key"}]  # 0 has made it itself
    await operations.change(1, "register", ["other", "/key"])
    await operations.change(1, "unregister", ["region"])
    assert [one[1]["arguments"] for one in operations.after(0)[0]] == [["other", "/key"]]
    await operations.change(1, "unregister", [""])
    assert operations.after(0)[0] == []


async def test_settings_are_remembered_as_they_are() -> None:
    operations = GroupOperations(list)
    await operations.change(0, "log", [{"log_info": False, "log_format": "json"}])
    await operations.change(1, "log", [{"log_info": True}])
    await operations.change(1, "trace", [{"trace_rate": "5"}, "model"])
    await operations.operate(load("a"), b"file")
    await operations.operate({"kind": FOLLOW, "changed": ["b"], "gone": []}, b"")
    found, data = operations.after(0)
    assert [one[1].get("arguments", one[1].get("name")) for one in found] == [
        [{"log_info": True, "log_format": "json"}],
        [{"trace_rate": "5"}, "model"],
        "a",
    ]
    assert (found[-1][2], data) == (4, b"file")
    assert operations.after(found[1][0])[0] == found[2:]
