"""The response cache: which requests have the same key, and which responses are dropped to make room."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.memory.raw import EncodedBytes
from flowserve.memory.tensor import Tensor
from flowserve.runtime.admission.cache import ENTRY_BYTES, LruCache, cache_key, cached_copy
from flowserve.values import Array, Request

SERVED = ("m", 1, 1)


def request(**inputs: Array) -> Request:
    return Request(dict(inputs))


@given(
    st.integers(0, 60),
    st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 70)), max_size=60),
)
def test_property_the_cache_stays_within_its_capacity_and_drops_the_least_recently_used_value(
    capacity: int, steps: list[tuple[bool, int, int]]
) -> None:
    lru: LruCache[int, int] = LruCache(capacity)
    model: OrderedDict[int, tuple[int, int]] = OrderedDict()
    for number, (puts, key, nbytes) in enumerate(steps):
        if not puts:
            expected = model.get(key)
            if expected is not None:
                model.move_to_end(key)
            assert lru.get(key) == (None if expected is None else expected[0])
            continue
        fits = nbytes <= capacity
        assert lru.put(key, number, nbytes) is fits
        if fits:
            model.pop(key, None)
            while sum(size for _, size in model.values()) + nbytes > capacity:
                model.popitem(last=False)
            model[key] = number, nbytes
        assert len(lru) == len(model)
        assert lru.nbytes == sum(size for _, size in model.values()) <= capacity


@pytest.mark.fault("R12")
def test_a_value_larger_than_the_capacity_is_not_cached_and_drops_nothing() -> None:
    lru: LruCache[str, str] = LruCache(10)
    assert lru.put("small", "kept", 10)
    assert not lru.put("large", "not kept", 11)
    assert (lru.get("small"), lru.get("large")) == ("kept", None)


def test_requests_that_may_be_answered_differently_have_different_keys() -> None:
    four = np.arange(4, dtype=np.float32)
    words = np.array([b"ab", b"c"], np.object_)
    base = request(A=four, B=words)
    different = [
        request(A=four.reshape(2, 2), B=words),
        request(A=four.view(np.int32), B=words),
        request(A=four + 1, B=words),
        request(A=four, B=np.array([b"a", b"bc"], np.object_)),
        request(A=four),
        request(B=four, A=words),
        replace(base, parameters={"mode": "fast"}),
        replace(base, parameters={"mode": True}),
        replace(base, parameters={"mode": 1}),
        replace(base, sequence_id=4),
    ]
    keys = [cache_key(SERVED, one, ("Y",)) for one in (base, *different)]
    keys += [
        cache_key(SERVED, base, ("Y", "Z")),
        cache_key(("m", 2, 1), base, ("Y",)),
        cache_key(("m", 1, 2), base, ("Y",)),
    ]
    assert len(set(keys)) == len(keys)
    assert {len(key) * 8 for key in keys} == {128}


def test_id_priority_timeout_and_input_order_are_not_part_of_the_key() -> None:
    one, two = np.arange(6.0).reshape(2, 3), np.arange(4)
    same = [
        Request({"A": one, "B": two}),
        Request({"B": two.copy(), "A": np.asfortranarray(one)}, id="7", priority=2, timeout_us=5, stamp=9),
    ]
    assert len({cache_key(SERVED, each, ("Y",)) for each in same}) == 1


def test_a_cached_response_owns_its_memory_and_is_read_only() -> None:
    block = np.arange(12, dtype=np.float32).reshape(6, 2)
    answers, nbytes = cached_copy({"Y": Tensor(block, 2, 4)})
    block[:] = 0
    array = answers.tensors["Y"].array
    assert array.tolist() == [[4, 5], [6, 7]]
    assert array.base is None
    assert not array.flags.writeable
    assert nbytes == 16 + ENTRY_BYTES


def test_the_size_of_a_cached_response_counts_string_contents_and_parameters() -> None:
    _, small = cached_copy({"Y": Tensor(np.array([b"x"], np.object_))})
    _, large = cached_copy({"Y": Tensor(np.array([b"x" * 1001], np.object_))})
    assert large - small == 1000
    _, talking = cached_copy({"Y": Tensor(np.array([b"x"], np.object_))}, {"said": "y" * 96})
    assert talking - small == 100


def test_large_strings_are_cached_in_their_wire_form_and_in_memory_of_their_own() -> None:
    memory = bytearray(b"\1\0\0\0a" * 3)
    whole = EncodedBytes.of(memory, "y", "m", (3, 1))
    response, nbytes = cached_copy({"y": Tensor(whole, 0, 2)})
    memory[:] = bytes(15)
    assert response.tensors["y"].array.tolist() == [[b"a"], [b"a"]]
    assert nbytes == ENTRY_BYTES + 10
