"""The bytes that are under way to one machine."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given, settings
from hypothesis import strategies as st

from flowserve.cluster.traffic import MachineTraffic


@settings(max_examples=20)
@given(sizes=st.lists(st.integers(1, 100), min_size=1, max_size=40), seed=st.integers(0, 999))
def test_no_more_than_the_room_is_under_way_but_for_one_batch_and_each_gets_its_turn(
    sizes: list[int], seed: int
) -> None:
    room, never = MachineTraffic(60), threading.Event()
    lock = threading.Lock()
    under_way: list[int] = []
    left = [*sizes]
    random.Random(seed).shuffle(left)

    def send(nbytes: int) -> None:
        assert room.wait(nbytes, never)
        with lock:
            under_way.append(nbytes)
            assert sum(under_way) <= 60 or len(under_way) == 1
        threading.Event().wait(0.0002)
        with lock:
            under_way.remove(nbytes)
        room.give_back(nbytes)

    with ThreadPoolExecutor(6) as threads:
        for done in [threads.submit(send, nbytes) for nbytes in left]:
            done.result(timeout=30)
    assert room.nbytes == 0


def test_a_large_batch_is_not_passed_by_small_ones_for_ever() -> None:
    room, never = MachineTraffic(10), threading.Event()
    room.take(6)
    passed: list[int] = []
    threads = []
    for nbytes in (9, 1):
        one = threading.Thread(target=wait_and_note, args=(room, nbytes, never, passed))
        one.start()
        threads.append(one)
        until_waiting(room, len(threads))
    assert passed == []
    room.give_back(6)
    for one in threads:
        one.join(30)
    assert passed == [9, 1]


def wait_and_note(room: MachineTraffic, nbytes: int, never: threading.Event, passed: list[int]) -> None:
    room.wait(nbytes, never)
    passed.append(nbytes)


def until_waiting(room: MachineTraffic, count: int) -> None:
    while len(room._waiting) < count:
        threading.Event().wait(0.001)


def test_one_that_gives_up_leaves_without_room() -> None:
    room, gave_up = MachineTraffic(10), threading.Event()
    room.take(10)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(room.wait, 5, gave_up)
        until_waiting(room, 1)
        gave_up.set()
        room.wake()
        assert waiting.result(timeout=30) is False
    assert room.nbytes == 10
    room.give_back(10)
    assert room.wait(5, gave_up)
