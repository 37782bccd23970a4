"""The messages of worker processes: each is read as it was written, and any other bytes are an error, never a crash."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flowserve
from flowserve.backends.worker import messages
from flowserve.backends.worker.messages import (
    FROM_CALLER,
    FROM_INSTANCE,
    TO_CALLER,
    TO_INSTANCE,
    Form,
    Garbled,
    decode_about,
    decode_release,
    decode_result,
    decode_run,
    decode_server_reply,
    encode_about,
    encode_release,
    encode_result,
    encode_run,
    encode_server_reply,
    pack,
    read_fields,
    read_passed,
    unpack,
)
from flowserve.elsewhere.cluster.frames import KINDS
from flowserve.errors import Internal

WORD = st.integers(0, 2**64 - 1)
SMALL = st.integers(0, 6)
BLOCKS = st.lists(st.tuples(WORD, WORD), max_size=3)
SHAPE = st.lists(WORD, max_size=3).map(tuple)
PLACE = st.tuples(WORD, WORD, WORD, SHAPE)
TEXT = st.text(st.characters(exclude_categories=()), max_size=6)  # lone surrogates too: clients send them as JSON
PARAMETERS = st.dictionaries(
    TEXT, st.one_of(TEXT, st.integers(), st.booleans(), st.floats(allow_nan=False)), max_size=2
)
FACTS = st.tuples(
    TEXT, WORD, WORD, st.one_of(TEXT, WORD, st.integers(-(2**70), 2**70)), st.booleans(), st.booleans(), PARAMETERS
)


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    """The arguments of `encode_run`."""
    rows = draw(st.lists(WORD, max_size=3))
    apart = st.lists(st.one_of(st.none(), PLACE), min_size=len(rows), max_size=len(rows))
    return {
        "number": draw(WORD),
        "route": draw(WORD),
        "stage": draw(WORD),
        "rows": rows,
        "wanted": draw(st.lists(st.lists(WORD, max_size=3).map(tuple), max_size=3)),
        "columns": draw(st.lists(st.one_of(st.none(), PLACE, apart), max_size=3)),
        "passed": tuple(draw(st.lists(WORD, max_size=4))),
        "about": tuple(draw(st.lists(WORD, max_size=4))),
        "text": draw(st.binary(max_size=8)),
    }


@given(batches(), st.lists(st.tuples(BLOCKS, st.lists(WORD, max_size=2).map(tuple)), min_size=1, max_size=3))
def test_a_batch_is_read_as_it_was_written(batch: dict[str, Any], updates: list[Any]) -> None:
    kind, words, text = unpack(encode_run(**batch, updates=_updates(updates)))
    assert kind == messages.RUN
    read = decode_run(words, text)
    assert read.update == updates[0]
    assert read.later == tuple(_updates(updates[1:]))
    assert {name: getattr(read, name) for name in batch} == batch


@given(st.lists(FACTS, min_size=1, max_size=3), st.booleans(), st.integers(0, 2), st.data())
def test_the_facts_of_requests_are_read_as_they_were_written(
    facts: list[tuple[Any, ...]], are_plain: bool, stages: int, data: st.DataObject
) -> None:
    members = len(facts)
    contexts = [data.draw(st.lists(TEXT, min_size=members, max_size=members)) for _ in range(stages)]
    if are_plain and not contexts:
        return
    written = encode_about(None if are_plain else facts, contexts)
    assert decode_about(*written, members) == (None if are_plain else facts, contexts)
    with pytest.raises(Garbled):
        decode_about(*written, members + 1)


@pytest.mark.parametrize(
    "facts", [("", -1, 0, 0), ("", 0, 2**64, 0), ("", 0, 0, (1, 2)), (5, 0, 0, 0), ("", 0, 0, None)]
)
def test_facts_that_no_message_can_hold_are_refused_with_a_sentence(facts: tuple[Any, ...]) -> None:
    with pytest.raises(Internal, match="holds a parameter that is no text, number or boolean"):
        encode_about([(*facts, False, False, {})], ())
    with pytest.raises(Internal, match="holds a parameter that is no text, number or boolean"):
        encode_about([("", 0, 0, 0, False, False, {"a": b"bytes"})], ())


RESULT_COLUMN = st.tuples(TEXT, WORD, SHAPE, st.one_of(st.binary(max_size=5), st.tuples(st.integers(1, 9), WORD, WORD)))


@given(
    *(WORD, st.booleans(), WORD, BLOCKS),
    *(st.one_of(st.none(), st.tuples(TEXT, TEXT).map(list)), st.lists(RESULT_COLUMN, max_size=3)),
    st.dictionaries(TEXT, st.one_of(TEXT, st.booleans(), st.integers(-(2**63), 2**64 - 1)), max_size=2),
)
def test_the_result_of_a_call_is_read_as_it_was_written(
    number: int, is_last: bool, token: int, blocks: Any, error: Any, columns: Any, parameters: Any
) -> None:
    kind, words, text = unpack(encode_result(number, is_last, token, blocks, error, columns, parameters))
    assert kind == messages.RESULT
    assert decode_result(words, text) == (number, is_last, token, blocks, error, columns, parameters)


@given(WORD, BLOCKS, st.one_of(st.none(), TEXT, st.lists(st.integers(), max_size=2)))
def test_a_reply_of_the_server_is_read_as_it_was_written(number: int, blocks: Any, answer: Any) -> None:
    kind, words, text = unpack(encode_server_reply(number, blocks, None, answer))
    assert kind == messages.SERVER_REPLY
    assert decode_server_reply(words, text) == (number, blocks, None, answer)


@given(st.booleans(), BLOCKS, st.lists(WORD, max_size=3).map(tuple))
def test_a_release_of_memory_is_read_as_it_was_written(is_quiet: bool, blocks: Any, ended: tuple[int, ...]) -> None:
    kind, words, _ = unpack(encode_release(is_quiet=is_quiet, blocks=blocks, ended=ended))
    assert kind == messages.RELEASE
    assert decode_release(words) == (is_quiet, blocks, ended)


def _updates(updates: list[Any]) -> list[int]:
    """The words of updates, as `Channel.take_update` returns them."""
    words = []
    for blocks, ended in updates:
        words += [len(blocks), len(ended), *(word for block in blocks for word in block), *ended]
    return words


def _decode(words: tuple[int, ...], text: bytes, members: int) -> None:
    """Give the words and the text to every decoder. Each may raise Garbled, and nothing else."""
    for decode in (
        lambda: decode_run(words, text),
        lambda: decode_about(words[1:], text, members),
        lambda: decode_result(words, text),
        lambda: decode_server_reply(words, text),
        lambda: decode_release(words),
        lambda: read_passed(words, 1, members),
    ):
        with suppress(Garbled):
            decode()


TAIL = st.one_of(
    st.binary(max_size=20), st.sampled_from([b"[null,", b"[" * 5000, b"[null, null]\n", b'{"a": 1}', b"\xff"])
)


@pytest.mark.fault("W10")
@given(st.lists(st.one_of(SMALL, WORD), max_size=24), TAIL, SMALL)
def test_any_words_are_a_message_or_an_error(words: list[int], text: bytes, members: int) -> None:
    _, found, tail = unpack(pack(messages.RUN, words) + text)
    assert found[1:] == tuple(words)
    assert tail == text
    _decode(found, tail, members)


@pytest.mark.fault("W10")
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_error(message: bytes) -> None:
    try:
        _, words, text = unpack(message)
    except Garbled:
        return
    _decode(words, text, 2)


@pytest.mark.fault("W10")
@given(batches(), st.lists(st.tuples(st.integers(0, 99), st.one_of(SMALL, WORD)), max_size=3), st.integers(0, 30))
def test_a_batch_that_was_changed_or_cut_off_is_a_batch_or_an_error(
    batch: dict[str, Any], changes: list[tuple[int, int]], cut: int
) -> None:
    _, words, text = unpack(encode_run(**batch, updates=_updates([([(1, 2)], (3,))])))
    changed = [*words]
    for index, value in changes:
        changed[1 + index % (len(changed) - 1)] = value
    _decode(tuple(changed[: max(1, len(changed) - cut)]), text, 1)
    if cut and not changes:
        with pytest.raises(Garbled):
            decode_run(words[: max(1, len(words) - cut)], text)


PLACES = [(1, 64, 8, (2, 1)), None, [(1, 128, 4, (1,)), None]]
BATCH = unpack(encode_run(7, 1, 2, [1, 1], [(0, 1)], [1, 1, 5, 4096, 6, 0, 0], PLACES, (8, 9), (10, 11), b"text"))
ABOUT = encode_about([("id", 1, 2, "seq", True, False, {"a": 1}), ("", 0, 0, 3, False, True, {})], [["c", "d"]])
RESULT = unpack(encode_result(1, True, 0, [(2, 3)], None, [("OUT", 11, (1,), b"1234"), ("BIG", 11, (9,), (4, 0, 36))]))
RELEASE = unpack(encode_release(is_quiet=True, blocks=[(1, 2), (1, 4096)], ended=()))
PASSED = (1, 2, 3, 4, 5, 2, 0, 8, 1, 2, 64, 4, 1, 1)


@pytest.mark.fault("W10")
@pytest.mark.parametrize(
    ("decode", "words"),
    [
        (lambda words: decode_run(words, BATCH[2]), BATCH[1]),
        (lambda words: decode_about(words, ABOUT[1], 2), tuple(ABOUT[0])),
        (lambda words: decode_result(words, RESULT[2]), RESULT[1]),
        (decode_release, RELEASE[1]),
        (lambda words: read_passed(words, 0, 1), PASSED),
    ],
    ids=["run", "about", "result", "release", "passed"],
)
def test_every_message_that_is_cut_off_is_an_error(decode: Any, words: tuple[int, ...]) -> None:
    decode(words)
    for end in range(len(words)):
        with pytest.raises(Garbled):
            decode(words[:end])
    if words not in (PASSED, RELEASE[1]):  # other words may follow these
        with pytest.raises(Garbled):
            decode((*words, 0))


@pytest.mark.fault("W10")
def test_a_text_that_does_not_fit_its_words_is_an_error() -> None:
    for text in (ABOUT[1][:-1], ABOUT[1] + b"x", b"\xff" * len(ABOUT[1])):
        with pytest.raises(Garbled):
            decode_about(ABOUT[0], text, 2)
    nested = b"[" * 100_000
    words = [1, 1, 0, 0, 0, 0, 0, 0, 0, len(nested)]
    with pytest.raises(Garbled):
        decode_about(words, nested, 1)
    for text in (RESULT[2][:-1], RESULT[2][5:], nested, b"null", b'[null, ["OUT", 5]]\n1234'):
        with pytest.raises(Garbled):
            decode_result(RESULT[1], text)
    for text in (b"", b"null", b"[null]", b"5", nested):
        with pytest.raises(Garbled):
            decode_server_reply((0, 1, 2, 3), text)
    with pytest.raises(Garbled):
        decode_server_reply((0, 1, 2), b"[null, null]")


@pytest.mark.fault("W10")
def test_an_update_longer_than_its_part_is_an_error() -> None:
    with pytest.raises(Garbled, match="an update that is cut off"):
        decode_run(unpack(encode_run(7, 0, 0, [1], [(0,)], [1, 0], [None], (8, 9)))[1], b"")


@pytest.mark.fault("W10")
def test_no_message_is_decoded_by_marshal_or_pickle() -> None:
    """Both execute or crash on hostile bytes. The server pickles the job of a process, which the process reads."""
    root = Path(flowserve.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            if {"marshal", "pickle"} & {*names, getattr(node, "module", "")}:
                found.add(path.relative_to(root).as_posix())
    assert found == {
        "backends/worker/main.py",
        "elsewhere/cluster/pipes.py",
        "runtime/loading/completion.py",
        "runtime/processes/environments.py",
        "runtime/remote/shm.py",
    }


@pytest.mark.parametrize("table", [TO_INSTANCE, FROM_INSTANCE, FROM_CALLER, TO_CALLER, KINDS])
def test_every_kind_of_message_is_in_a_table_and_read_by_its_fields(table: Mapping[int, Form]) -> None:
    assert len({form.name for form in table.values()}) == len(table)
    for kind, form in table.items():
        if "..." in form.fields:
            with pytest.raises(Garbled):
                read_fields(table, kind, (kind,))
            continue
        fixed, _, group = form.fields.partition("[")
        for groups in (0, 1, 3) if group else (0,):
            fields = [*range(len(fixed.split()) + groups * len(group.rstrip("]").split()))]
            head, words, _ = unpack(pack(kind, fields))
            assert (head, [*read_fields(table, kind, words)]) == (kind, fields)
        wrong = [] if group else [(kind, *fields, 0)]
        wrong += [(kind, *fields[: len(fixed.split()) - 1])] if fixed else []
        for words in wrong:
            with pytest.raises(Garbled, match=form.name):
                read_fields(table, kind, words)
    with pytest.raises(Garbled, match="of kind 99"):
        read_fields(table, 99, (99,))
