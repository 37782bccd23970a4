"""Models written for Triton's Python backend run unchanged, and their errors affect only their own requests."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from flowserve.backends import registry
from flowserve.backends.base import OutputNotes, Verifies, Work
from flowserve.backends.python.answers import AnswerReader
from flowserve.backends.python.pb_utils.inference import InferenceResponse
from flowserve.backends.python.pb_utils.inference import Tensor as Answer
from flowserve.backends.python.source import forget_model
from flowserve.config.types import Completion, DynamicBatching, ModelConfig, SequenceBatching, SequenceState
from flowserve.errors import (
    AlreadyExists,
    Cancelled,
    FlowserveError,
    Invalid,
    ModelFailed,
    ModelUnknown,
    NotFound,
    Problems,
    Unavailable,
    Unsupported,
)
from flowserve.memory import raw
from flowserve.memory.pool import HOST
from flowserve.values import Array, DType, Request
from tests.support.backends import Opened, Repository, config_of, sample, spec, tensors, values

Open = Callable[..., Opened]
FILE = "1/model.py"

HEAD = "import numpy as np\nimport triton_python_backend_utils as pb_utils\n"
FAILED = "Failed to process the request(s) for model instance 'm_0', message: "
NO_RESPONSE = f"{FAILED}Expected an 'InferenceResponse' object in the execute function return list, found type"
RETURNS = "execute returns [pb_utils.InferenceResponse([pb_utils.Tensor(NAME, ARRAY)]), ...]"
DOUBLE = """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            responses.append(pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("y", x * 2)]))
        return responses
"""


def executing(body: str, *methods: str) -> str:
    """A model whose execute loops over `requests` and whose `body` appends to `responses`; `x` is the input array."""
    lines = ["class TritonPythonModel:", *dedent("\n".join(methods)).splitlines()]
    text = [
        lines[0],
        *("    " + line for line in lines[1:]),
        "    def execute(self, requests):",
        "        responses = []",
        "        for request in requests:",
        "            given = pb_utils.get_input_tensor_by_name(request, 'x')",
        "            x = None if given is None else given.as_numpy()",
        *("            " + line for line in dedent(body).strip().splitlines()),
        "        return responses",
    ]
    return HEAD + "\n".join(text) + "\n"


def answer(expression: str, name: str = "y") -> str:
    return f"responses.append(pb_utils.InferenceResponse([pb_utils.Tensor('{name}', {expression})]))"


@pytest.fixture
def python(repository: Repository, opened: Open) -> Callable[..., Opened]:
    """`python(source)` writes the model and opens an instance of it: FP32 [4] in and out, batches of up to eight."""

    def start(
        source: str | bytes,
        *,
        name: str = "m",
        inputs: Sequence[Any] = (spec("x"),),
        outputs: Sequence[Any] = (spec("y"),),
        max_batch_size: int = 8,
        instance: str = "",
        strict: bool = False,
        **fields: Any,
    ) -> Opened:
        repository.write(name, FILE, source)
        config = config_of(name=name, inputs=inputs, outputs=outputs, max_batch_size=max_batch_size, **fields)
        return opened(config, instance, strict_outputs=str(strict).lower())

    return start


def rows(*marks: float) -> np.ndarray:
    return np.array([[mark] * 4 for mark in marks], np.float32)


# ------------------------------------------------------------------------------------------------------- running


def test_each_request_gets_its_own_response(python: Open) -> None:
    results = python(HEAD + DOUBLE).run({"x": rows(1)}, {"x": rows(2, 3)})
    assert values(results) == [rows(2).tolist(), rows(4, 6).tolist()]
    assert results.errors == {}
    assert not results.copied


@pytest.mark.parametrize("size", [4, 4000])
def test_an_array_of_a_subclass_is_returned_as_its_elements(python: Open, size: int) -> None:
    source = executing(answer("np.ma.masked_array(x, mask=x > 1)"))
    model = python(source, inputs=[spec("x", dims=(size,))], outputs=[spec("y", dims=(size,))])
    (column,) = model.run({"x": np.full((1, size), 2, np.float32)}).outputs
    assert raw.block(tensors(column)[0].array) == np.full((1, size), 2, np.float32).tobytes()


def test_an_invalid_string_fails_its_request_only(python: Open) -> None:
    source = executing(answer("np.array([['\\ud800' if x[0, 0] else 'text']], np.object_)"))
    results = python(source, outputs=[spec("y", (1,), DType.BYTES)]).run({"x": rows(0)}, {"x": rows(1)})
    assert values(results)[0] == [[b"text"]]
    assert [*results.errors] == [1]
    assert "output 'y': a string is no Unicode text" in str(results.errors[1])


@pytest.mark.parametrize("before", [b"\xef\xbb\xbf", b"# -*- coding: latin-1 -*-\n# f\xfcr\n"])
def test_a_file_may_have_any_encoding_that_python_reads(python: Open, before: bytes) -> None:
    assert values(python(before + (HEAD + DOUBLE).encode()).run({"x": rows(1)})) == [rows(2).tolist()]


def test_a_comment_in_another_encoding_is_accepted_as_by_python(python: Open) -> None:
    source = (HEAD + DOUBLE).encode() + b"# f\xfcr\n"
    assert values(python(source).run({"x": rows(1)})) == [rows(2).tolist()]


def test_a_file_with_an_invalid_encoding_is_refused_with_its_line(python: Open) -> None:
    with pytest.raises(
        Problems, match=r"m/1/model\.py:2:\d+: model 'm' is not valid Python 3\.\d+: \(unicode error\) 'utf-8'"
    ):
        python(b"x = 1\ny = '\xe4'\n")


def test_a_model_with_an_environment_may_be_written_for_another_python(repository: Repository) -> None:
    repository.write("m", FILE, "class TritonPythonModel: ...\ndef of a newer Python")
    config = config_of(name="m", inputs=[spec("x")], outputs=[spec("y")])
    backend = registry.find("python")
    assert isinstance(backend, Verifies)
    with pytest.raises(Problems, match=r"m/1/model\.py:2:8: model 'm' is not valid Python 3\.\d+: "):
        backend.verify(config, repository.files("m"))
    own = replace(config, parameters={"EXECUTION_ENV_PATH": "$$TRITON_MODEL_DIRECTORY/env"})
    backend.verify(own, repository.files("m"))
    assert backend.complete(own, repository.files("m")) == Completion()


def test_small_outputs_of_a_batch_are_contiguous(python: Open) -> None:
    results = python(HEAD + DOUBLE).whole(rows(1, 2, 3))
    first, *others = tensors(results.outputs[0])
    assert all(tensor.block is first.block for tensor in others)
    assert list(results.placed) == [first.block.nbytes] == [48]


def test_a_model_without_batching_gets_and_returns_whole_tensors(python: Open) -> None:
    model = python(executing(answer("x.sum(axis=0)")), max_batch_size=0, inputs=[spec("x", [-1, 4])])
    assert values(model.run({"x": rows(1, 2)})) == [[3.0] * 4]


@pytest.mark.parametrize("dtype", list(DType), ids=str)
def test_every_data_type_is_served(python: Open, dtype: DType) -> None:
    model = python(
        executing(f"assert given.triton_dtype() == {dtype.number}\n{answer('x.copy()')}"),
        inputs=[spec("x", dtype=dtype)],
        outputs=[spec("y", dtype=dtype)],
    )
    array = sample(dtype, 2)
    results = model.run({"x": array}, {"x": array})
    assert values(results) == [array.tolist()] * 2
    assert tensors(results.outputs[0])[0].array.dtype == dtype.numpy


@pytest.mark.fault("B8")
def test_strings_are_bytes_on_both_sides_for_any_string_type(python: Open) -> None:
    for expression in (
        "np.array([[b'\\xff\\0', 'ü', b'', 'a']], dtype=object)",
        "np.array([['b', 'ü', '', 'a']])",
        "np.array([[b'b', b'c', b'', b'a']])",
    ):
        model = python(
            executing(f"assert x.dtype == object and type(x[0, 0]) is bytes\n{answer(expression)}"),
            inputs=[spec("x", dtype=DType.BYTES)],
            outputs=[spec("y", dtype=DType.BYTES)],
        )
        found = tensors(model.run({"x": sample(DType.BYTES)}).outputs[0])[0].array
        assert found.dtype == object
        assert {type(element) for element in found.ravel()} == {bytes}
        assert found[0, 3] == b"a"


@pytest.mark.fault("S5")
def test_tensors_without_elements_are_served(python: Open) -> None:
    model = python(executing(answer("x")), inputs=[spec("x", [-1])], outputs=[spec("y", [-1])])
    results = model.run({"x": np.zeros((2, 0), np.float32)}, {"x": np.zeros((0, 3), np.float32)})
    assert [tensor.shape for tensor in tensors(results.outputs[0])] == [(2, 0), (0, 3)]
    assert results.errors == {}


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BYTES], ids=str)
def test_members_of_one_batch_may_have_outputs_of_different_shapes(python: Open, dtype: DType) -> None:
    model = python(
        executing(answer(f"np.zeros((1, int(x[0, 0])), pb_utils.triton_to_numpy_type({dtype.number}))")),
        outputs=[spec("y", [-1], dtype)],
    )
    results = model.whole(rows(1, 3))
    assert [tensor.shape for tensor in tensors(results.outputs[0])] == [(1, 1), (1, 3)]


def test_a_missing_optional_input_is_none(python: Open) -> None:
    model = python(
        executing(f"assert len(request.inputs()) == 1\nassert x is None\n{answer('np.ones((1, 4), np.float32)')}"),
        inputs=[spec("x", optional=True), spec("z")],
    )
    assert values(model.run({"z": rows(1)})) == [rows(1).tolist()]


def test_reshape_shows_the_model_one_shape_and_the_client_another(python: Open) -> None:
    model = python(
        executing(f"assert x.shape[1:] == (2, 2) and given.shape() == list(x.shape)\n{answer('x.reshape(-1, 4, 1)')}"),
        inputs=[spec("x", reshape=(2, 2))],
        outputs=[spec("y", reshape=(4, 1))],
    )
    assert values(model.run({"x": rows(1, 2)})) == [rows(1, 2).tolist()]


def test_only_wanted_outputs_are_taken_and_unknown_ones_ignored(python: Open) -> None:
    tensors = "[pb_utils.Tensor('y', x), pb_utils.Tensor('nobody', x), pb_utils.Tensor('z', x)]"
    model = python(
        executing(f"responses.append(pb_utils.InferenceResponse({tensors}))"),
        outputs=[spec("y"), spec("z"), spec("missing")],
    )
    results = model.run({"x": rows(1)}, wanted=("z", "missing"))
    assert [column[0] is None for column in results.outputs] == [True, False, True]
    assert results.errors == {}


def test_async_execute_runs_on_a_loop_of_its_instance(python: Open) -> None:
    source = HEAD + dedent("""
        import asyncio
        class TritonPythonModel:
            async def one(self, request):
                await asyncio.sleep(0)
                x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
                return pb_utils.InferenceResponse([pb_utils.Tensor("y", x + 1)])
            async def execute(self, requests):
                return await asyncio.gather(*[self.one(request) for request in requests])
    """)
    model = python(source)
    assert values(model.run({"x": rows(1)}, {"x": rows(2)})) == [rows(2).tolist(), rows(3).tolist()]
    assert values(model.run({"x": rows(5)})) == [rows(6).tolist()]


def test_a_request_has_its_ids_flags_and_parameters(python: Open) -> None:
    facts = (
        "[request.request_id(), request.correlation_id(), request.flags(), json.loads(request.parameters()),"
        " request.requested_output_names(), request.model_name(), request.model_version(), request.priority(),"
        " request.timeout(), request.is_cancelled()]"
    )
    body = f"self.seen = {facts}\nraise pb_utils.TritonModelException(json.dumps(self.seen))"
    model = python("import json\n" + executing(body))
    about = Request(
        {},
        id="r1",
        priority=3,
        timeout_us=500,
        sequence_id="s",
        sequence_start=True,
        sequence_end=True,
        parameters={"temperature": 0.5},
    )
    with pytest.raises(ModelFailed) as caught:
        model.run({"x": rows(1)}, about=[about])
    text = str(caught.value)
    found = json.loads(text[text.index("[") : text.rindex("]") + 1])
    assert found == ["r1", "s", 3, {"temperature": 0.5}, ["y"], "m", 1, 3, 500, False]


def test_initialize_gets_tritons_arguments_and_finalize_is_called_once(
    python: Open, repository: Repository, tmp_path: Any
) -> None:
    written = tmp_path / "written.json"
    source = HEAD + dedent(f"""
        import json, pathlib
        class TritonPythonModel:
            def initialize(self, args):
                self.args = args
                config = json.loads(args["model_config"])
                assert pb_utils.get_input_config_by_name(config, "x")["data_type"] == "TYPE_FP32"
                assert pb_utils.get_output_config_by_name(config, "y")["dims"] == [4]
                assert pb_utils.get_output_config_by_name(config, "q") is None
                assert not pb_utils.using_decoupled_model_transaction_policy(config)
            def execute(self, requests):
                return []
            def finalize(self):
                with open({str(written)!r}, "a") as file:
                    file.write(json.dumps(self.args) + "\\n")
    """)
    model = python(source, instance="group_3")
    model.instance.close()
    model.instance.close()
    found = json.loads(written.read_text())
    assert all(isinstance(value, str) for value in found.values())
    del found["model_config"]
    assert found == {
        "model_instance_kind": "CPU",
        "model_instance_name": "group_3",
        "model_instance_device_id": "0",
        "model_repository": str(repository.path / "m"),
        "model_version": "1",
        "model_name": "m",
    }


def test_an_unknown_output_is_logged_once(python: Open, caplog: pytest.LogCaptureFixture) -> None:
    model = python(executing(answer("x", "yy")))
    for _ in range(2):
        assert model.run({"x": rows(1)}).outputs == [[None]]
    told = "model 'm' answered output 'yy', which its configuration does not have; it is left out (did you mean 'y'?)"
    assert caplog.messages == [told]


def test_a_response_may_be_of_a_subclass(python: Open) -> None:
    source = executing("responses.append(Own([pb_utils.Tensor('y', x)]))")
    source = source.replace("class Tri", "class Own(pb_utils.InferenceResponse):\n    pass\nclass Tri")
    assert values(python(source).run({"x": rows(1)}, {"x": rows(2)})) == [rows(1).tolist(), rows(2).tolist()]


def test_the_name_of_an_output_may_be_bytes(python: Open) -> None:
    source = executing(answer("x").replace("'y'", "b'y'"))
    assert "b'y'" in source
    assert values(python(source).run({"x": rows(1)})) == [rows(1).tolist()]


@pytest.mark.parametrize("large", [1, 200_000], ids=["answered alike", "looked at one by one"])
@pytest.mark.parametrize("strict", [False, True])
def test_a_missing_output_is_noted_or_refused_only_if_it_was_requested(python: Open, large: int, strict: bool) -> None:
    body = f"""
        tensors = [pb_utils.Tensor('other', np.zeros((1, {large}), np.float32))]
        if x[0, 0] > 5:
            tensors.append(pb_utils.Tensor('y', x))
        responses.append(pb_utils.InferenceResponse(tensors))
    """
    model = python(executing(body), outputs=(spec("y"), spec("other", dims=(large,))), strict=strict)
    results = model.run({"x": rows(9)}, wanted=("y", "other"))
    assert results.outputs[0][0] is not None
    only = model.run({"x": rows(1)}, wanted=("other",))
    assert (only.errors, only.notes) == ({}, None)
    results = model.run({"x": rows(1)}, {"x": rows(9)}, wanted=("y", "other"))
    assert [one is not None for one in results.outputs[0]] == [False, True]
    if strict:
        text = "model 'm' returned no output 'y', which its configuration has"
        assert {m: str(error) for m, error in results.errors.items()} == {0: text}
    else:
        assert results.errors == {}
        assert results.notes is not None
        assert results.notes.left_out == {"y": 1}


def test_each_response_of_a_decoupled_model_may_have_other_outputs() -> None:
    for decoupled, left_out in ((True, None), (False, OutputNotes(left_out={"y": 1}))):
        config = config_of(outputs=(spec("y"),), max_batch_size=8, decoupled=decoupled)
        results = AnswerReader(config).read([InferenceResponse([])], Work([], [-1], [], [("y",)]))
        assert (results.outputs, results.errors, results.notes) == ([[None]], {}, left_out)


@pytest.mark.parametrize(
    ("wanted", "is_uniform"),
    [
        ([("y",)] * 3, True),
        ([("z",)] * 3, True),
        ([("y", "z")] * 3, True),
        ([("y",), ("y", "z"), ("y",)], False),
        ([("y", "z"), ("y",), ("y",)], False),
    ],
)
def test_outputs_that_no_request_wants_are_left_aside(wanted: list[tuple[str, ...]], is_uniform: bool) -> None:
    reader = AnswerReader(config_of(outputs=(spec("y"), spec("z")), max_batch_size=8))
    answers = [
        InferenceResponse([Answer("z", rows(m + 10) if "z" in names else np.zeros(7)), Answer("y", rows(m))])
        for m, names in enumerate(wanted)
    ]
    work = Work([], [1] * 3, [], wanted)
    assert (reader._read_uniform(answers, work) is not None) == is_uniform
    results = reader.read(answers, work)
    found = [[None if one is None else one.array.tolist() for one in column] for column in results.outputs]
    y = [rows(m).tolist() if "y" in names else None for m, names in enumerate(wanted)]
    z = [rows(m + 10).tolist() if "z" in names else None for m, names in enumerate(wanted)]
    assert (found, results.errors) == ([y, z], {})
    both: dict[int, tuple[str, ...]] = {m: ("z", "y") for m, names in enumerate(wanted) if len(names) == 2}
    assert results.notes == (OutputNotes(orders=both) if both else None)


def test_what_one_request_wants_is_not_left_aside_where_another_has_what_it_does_not_want() -> None:
    reader = AnswerReader(config_of(outputs=(spec("y"), spec("z"), spec("w")), max_batch_size=8))
    answers = [InferenceResponse([Answer(name, rows(m)), Answer("y", rows(9))]) for m, name in enumerate("zw")]
    results = reader.read(answers, Work([], [1, 1], [], [("y",), ("y", "w")]))
    (_, found) = results.outputs[2]
    assert found is not None
    assert found.array.tolist() == rows(1).tolist()
    answers[1]._outputs[:] = [Answer("z", rows(2))]
    answers[0]._outputs[:] = [Answer(name, rows(3)) for name in "zwy"]
    results = reader.read(answers, Work([], [1, 1], [], [("y",), ("y",)]))
    assert results.notes == OutputNotes(left_out={"y": 1})


def test_a_failed_request_has_no_missing_outputs(python: Open, caplog: pytest.LogCaptureFixture) -> None:
    python(executing("responses.append(pb_utils.InferenceResponse([], pb_utils.TritonError('no')))")).run(
        {"x": rows(1)}
    )
    assert caplog.messages == []


def test_a_models_log_messages_carry_its_name(python: Open, caplog: pytest.LogCaptureFixture) -> None:
    body = (
        "logger = pb_utils.Logger\nlogger.log_info('100% fine')\nlogger.log_warn('w')\nlogger.log_error('e')\n"
        f"logger.log_verbose('v')\nlogger.log('plain')\nlogger.log('bad', logger.ERROR)\n{answer('x')}"
    )
    with caplog.at_level(logging.DEBUG, "flowserve.model.m"):
        python(executing(body)).run({"x": rows(1)})
    assert [(record.name, record.levelname, record.getMessage()) for record in caplog.records] == [
        ("flowserve.model.m", "INFO", "100% fine"),
        ("flowserve.model.m", "WARNING", "w"),
        ("flowserve.model.m", "ERROR", "e"),
        ("flowserve.model.m", "DEBUG", "v"),
        ("flowserve.model.m", "INFO", "plain"),
        ("flowserve.model.m", "ERROR", "bad"),
    ]


# ------------------------------------------------------------------------------------------------------ ownership


def test_writes_of_a_model_to_its_input_are_not_visible_elsewhere(python: Open) -> None:
    model = python(executing(f"x *= 2\n{answer('x')}"))
    kept, readonly = rows(1), rows(1)
    readonly.flags.writeable = False
    for array in (kept, readonly):
        assert values(model.run({"x": array}, may_write=False)) == [rows(2).tolist()]
        assert array.tolist() == rows(1).tolist()
    assert values(model.run({"x": readonly}, may_write=True)) == [rows(2).tolist()]
    assert readonly.tolist() == rows(1).tolist()


def test_the_last_reader_writes_to_the_original_memory(python: Open) -> None:
    array = rows(1)
    python(executing(f"x *= 2\n{answer('x')}")).run({"x": array}, may_write=True)
    assert array.tolist() == rows(2).tolist()


def test_an_input_at_an_odd_address_arrives_aligned(python: Open) -> None:
    body = bytearray(17)
    array = np.frombuffer(body, np.float32, offset=1).reshape(1, 4)
    model = python(executing(f"assert x.flags.aligned\n{answer('x + 1')}"))
    assert values(model.run({"x": array}, may_write=True)) == [rows(1).tolist()]


WIDE = 40_000  # FP32 elements: more than the 64 KiB from which arrays are taken without copying


def wide(python: Open, source: str) -> Opened:
    return python(source, inputs=[spec("x", [WIDE])], outputs=[spec("y", [WIDE])], max_batch_size=8)


def ones(*marks: float) -> np.ndarray:
    return np.array([[mark] * WIDE for mark in marks], np.float32)


@pytest.mark.parametrize("expression", ["x * 2", "(x * 2).reshape(1, -1)", "(x[0] * 2)[None]"])
def test_a_large_new_output_is_taken_without_a_copy(
    python: Open, expression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    take = HOST.take

    def record(nbytes: int) -> Array:
        taken.append(nbytes)
        return take(nbytes)

    monkeypatch.setattr(HOST, "take", record)
    model = wide(python, executing(answer(expression)))
    results = model.run({"x": ones(1)}, {"x": ones(2)}, may_write=True)
    assert [tensor.array[0, 0] for tensor in tensors(results.outputs[0])] == [2, 4]
    assert taken == []


@pytest.mark.parametrize(
    "body",
    [
        # a buffer that is filled again for the next request
        "self.buffer = getattr(self, 'buffer', np.empty((1, 40000), np.float32))\nself.buffer[...] = x\n"
        + answer("self.buffer"),
        "self.buffer = getattr(self, 'buffer', np.empty((1, 40000), np.float32))\nself.buffer[...] = x\n"
        + answer("self.buffer[:]"),
        # a tensor, and a response, that are kept
        (
            "self.tensor = getattr(self, 'tensor', None) or pb_utils.Tensor('y', np.empty((1, 40000), np.float32))\n"
            "self.tensor.as_numpy()[...] = x\nresponses.append(pb_utils.InferenceResponse([self.tensor]))"
        ),
        (
            "y = x * 1\nself.kept = pb_utils.InferenceResponse([pb_utils.Tensor('y', y)])\ndel y\n"
            "responses.append(self.kept)"
        ),
        # the input, under another name
        answer("x"),
        "responses.append(pb_utils.InferenceResponse([pb_utils.Tensor('y', given.as_numpy())]))",
    ],
)
def test_an_array_that_a_model_keeps_is_not_written_by_the_next_step(python: Open, body: str) -> None:
    """Readers may write to an output: that must not change the model's own array or its input."""
    model = wide(python, executing(body))
    array = ones(1)
    first = tensors(model.run({"x": array}, may_write=False).outputs[0])[0].array
    first[...] = -1
    second = tensors(model.run({"x": ones(2)}, may_write=False).outputs[0])[0].array
    assert array[0, 0] == 1
    assert first[0, 0] == -1
    assert second[0, 0] == 2
    assert not np.shares_memory(first, second)


def test_one_array_returned_twice_becomes_two(python: Open) -> None:
    model = python(
        executing("y = x * 2\nresponses.append(pb_utils.InferenceResponse([pb_utils.Tensor(n, y) for n in 'yz']))"),
        inputs=[spec("x", [WIDE])],
        outputs=[spec("y", [WIDE]), spec("z", [WIDE])],
    )
    (y,), (z,) = (tensors(column) for column in model.run({"x": ones(1)}).outputs)
    assert not np.shares_memory(y.array, z.array)


def test_outputs_are_contiguous_for_any_returned_array(python: Open) -> None:
    model = python(
        executing(answer("np.ones((200, 300, 1), np.float32).T")),
        outputs=[spec("y", [300, 200])],
        inputs=[spec("x")],
    )
    assert tensors(model.run({"x": rows(1)}).outputs[0])[0].array.flags.c_contiguous


# ------------------------------------------------------------------------------------------------------ failures


@pytest.mark.fault("D5")
@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("", ModelFailed),
        (", pb_utils.TritonError.UNKNOWN", ModelUnknown),
        (", pb_utils.TritonError.INTERNAL", ModelFailed),
        (", pb_utils.TritonError.NOT_FOUND", NotFound),
        (", pb_utils.TritonError.INVALID_ARG", Invalid),
        (", pb_utils.TritonError.UNAVAILABLE", Unavailable),
        (", pb_utils.TritonError.UNSUPPORTED", Unsupported),
        (", pb_utils.TritonError.ALREADY_EXISTS", AlreadyExists),
        (", pb_utils.TritonError.CANCELLED", Cancelled),
    ],
)
def test_a_request_the_model_refuses_fails_alone_with_the_models_text(
    python: Open, code: str, kind: type[FlowserveError]
) -> None:
    body = f"""
if x[0, 0] == 2:
    responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("two is too many"{code})))
else:
    {answer("x")}
"""
    results = python(executing(body)).whole(rows(1, 2, 3))
    assert values(results) == [rows(1).tolist(), None, rows(3).tolist()]
    assert {m: (type(error), str(error)) for m, error in results.errors.items()} == {1: (kind, "two is too many")}


@pytest.mark.fault("D6", "R1")
@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("raise ValueError('no such thing')", "message: ValueError: no such thing (model 'm', m/1/model.py:10)"),
        ("raise pb_utils.TritonModelException('of its own')", "TritonModelException: of its own"),
        ("import sys; sys.exit(3)", "message: SystemExit: 3"),
        ("import asyncio; raise asyncio.CancelledError('gave up')", "message: CancelledError: gave up"),
        ("raise KeyboardInterrupt", "message: KeyboardInterrupt"),
        ("x[99]", "IndexError"),
    ],
)
def test_a_model_that_raises_fails_its_batch_without_a_traceback_and_serves_the_next(
    python: Open, body: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = python(executing(f"if x[0, 0] == 0:\n    {body}\n{answer('x')}"))
    begins = "Failed to process the request(s) for model instance 'm_0', message: "
    with pytest.raises(ModelFailed) as caught:
        model.run({"x": rows(0)})
    assert str(caught.value).startswith(begins)
    assert text in str(caught.value)
    with pytest.raises(ModelFailed) as caught:
        model.run({"x": rows(1)}, {"x": rows(0)})
    kind = text.removeprefix("message: ").partition(":")[0]
    shared = "in a batch of 2 requests; its text is in the server's log (model 'm', m/1/model.py:10)"
    assert str(caught.value) == f"{begins}{kind} {shared}"
    assert "Traceback" not in str(caught.value)
    assert not caplog.records  # the line about the request has the traceback
    assert caught.value.raised is not None
    assert "m/1/model.py" in (caught.value.raised.take() or "")
    assert values(model.run({"x": rows(1)})) == [rows(1).tolist()]


@pytest.mark.fault("D6")
def test_an_execute_that_returns_no_list_fails_the_batch(python: Open) -> None:
    model = python(HEAD + DOUBLE.replace("return responses", "return responses[0]"))
    with pytest.raises(
        ModelFailed,
        match=r"message: Expected a list in the execute return, found type '<class 'c_python_backend_utils.Inference",
    ):
        model.run({"x": rows(1)})


@pytest.mark.fault("D6")
def test_an_execute_that_returns_a_tuple_fails_the_batch_as_on_triton(python: Open) -> None:
    model = python(HEAD + DOUBLE.replace("return responses", "return tuple(responses)"))
    with pytest.raises(ModelFailed, match="Expected a list in the execute return, found type '<class 'tuple'>'"):
        model.run({"x": rows(1)})


@pytest.mark.fault("D6")
@pytest.mark.parametrize(("change", "count"), [("responses[1:]", 1), ("responses * 2", 4), ("[]", 0)])
def test_another_number_of_responses_than_requests_fails_the_batch(python: Open, change: str, count: int) -> None:
    model = python(HEAD + DOUBLE.replace("return responses", f"return {change}"))
    with pytest.raises(ModelFailed) as caught:
        model.run({"x": rows(1)}, {"x": rows(2)})
    assert str(caught.value) == (
        f"{FAILED}Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
        f"InferenceRequest(s) size is:2, and InferenceResponse(s) size is:{count} "
        "(model 'm', m/1/model.py: execute must return one for each request, in their order)"
    )


@pytest.mark.fault("D6")
@pytest.mark.parametrize("returned", ["None", "[None]"])
def test_no_response_at_all_fails_the_batch(python: Open, returned: str) -> None:
    with pytest.raises(ModelFailed, match="its execute returned None or a list of None, and answered through no "):
        python(HEAD + DOUBLE.replace("return responses", f"return {returned}")).run({"x": rows(1)})


CONFIGURED_FP32 = "the configuration promises FP32, the model answered"
CONFIGURED_SHAPE = "the configuration promises shape [1,4], the model answered"
CONVERTED = "array.astype converts it, or change data_type"
OTHER_DIMS = "return that shape, or change dims"
OF_ROWS = "the first dimension is that of the rows"
PASSED_ON = "it is passed on as it is (--strict-outputs refuses it)"


@pytest.mark.fault("S10", "B9")
@pytest.mark.parametrize(
    ("expression", "text", "passed"),
    [
        ("x.astype(np.float64)", f"{CONFIGURED_FP32} float64; {CONVERTED}", rows(2).tolist()),
        ("x[:, :3]", f"{CONFIGURED_SHAPE} [1,3]; {OTHER_DIMS}", rows(2)[:, :3].tolist()),
        ("x[:, :0]", f"{CONFIGURED_SHAPE} [1,0]; {OTHER_DIMS}", [[]]),
        ("np.array([])", f"{CONFIGURED_FP32} float64; {CONVERTED}", []),
        (
            "np.array([['a'] * 4])",
            f"{CONFIGURED_FP32} BYTES; return another array, or change data_type",
            [[b"a"] * 4],
        ),
        (
            "np.concatenate([x, x])",
            f"{CONFIGURED_SHAPE} [2,4]; {OF_ROWS}: return one for each row of the request",
            [*rows(2).tolist(), *rows(2).tolist()],
        ),
        ("x[0]", f"{CONFIGURED_SHAPE} [4]; {OF_ROWS}: array[numpy.newaxis] adds it", rows(2)[0].tolist()),
        (
            "np.ones((), np.float32)",
            f"{CONFIGURED_SHAPE} []; {OF_ROWS}: return one for each row of the request",
            1.0,
        ),
        ("x.astype(complex)", f"{CONFIGURED_FP32} complex128; {CONVERTED}", None),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_an_output_of_another_type_or_shape_is_passed_on_if_it_can_be_used(
    python: Open, expression: str, text: str, passed: Any, strict: bool
) -> None:
    model = python(executing(answer(f"{expression} if x[0, 0] == 2 else x")), strict=strict)
    results = model.whole(rows(1, 2, 3))
    if passed is None or strict:
        assert values(results) == [rows(1).tolist(), None, rows(3).tolist()]
        assert {m: (type(error), str(error)) for m, error in results.errors.items()} == {
            1: (ModelFailed, f"model 'm', output 'y': {text}")
        }
    else:
        assert values(results) == [rows(1).tolist(), passed, rows(3).tolist()]
        assert (results.errors, results.notes) == ({}, OutputNotes(unlike={"y": f"{text}; {PASSED_ON}"}))


@pytest.mark.parametrize("large", [1, 200_000], ids=["answered alike", "looked at one by one"])
def test_the_order_of_outputs_is_noted_if_it_is_not_the_configurations(python: Open, large: int) -> None:
    body = f"""
        others = np.zeros((1, {large}), np.float32)
        named = [pb_utils.Tensor('other', others), pb_utils.Tensor('y', x)]
        responses.append(pb_utils.InferenceResponse(named if x[0, 0] > 5 else named[::-1]))
    """
    model = python(executing(body), outputs=(spec("y"), spec("other", dims=(large,))))
    assert model.run({"x": rows(1)}, {"x": rows(2)}).notes is None
    for marks, member in (((9,), 0), ((1, 9), 1)):
        found = model.run(*[{"x": rows(mark)} for mark in marks])
        assert found.notes == OutputNotes(orders={member: ("other", "y")})


def test_a_state_of_a_sequence_is_never_passed_on_in_another_type(python: Open) -> None:
    sequence = SequenceBatching(1_000_000, is_direct=True, states=(SequenceState("s", "y", DType.FP32, (4,)),))
    model = python(executing(answer("x.astype(np.float64)")), sequence=sequence)
    assert [*model.run({"x": rows(1)}).errors] == [0]


@pytest.mark.parametrize(
    ("answered", "found"),
    [
        ("[None]", "NoneType"),
        ("[x]", "ndarray"),
        ("[pb_utils.Tensor('y', x), x]", "ndarray"),
        ("[('y', x)]", "tuple"),
    ],
)
def test_an_output_that_is_no_tensor_fails_its_request_only(python: Open, answered: str, found: str) -> None:
    body = f"responses.append(pb_utils.InferenceResponse({answered} if x[0, 0] == 2 else [pb_utils.Tensor('y', x)]))"
    model = python(executing(body))
    text = f"model 'm' answered {found} where pb_utils.Tensor was expected"
    results = model.whole(rows(1, 2, 3))
    assert values(results) == [rows(1).tolist(), None, rows(3).tolist()]
    assert {m: (type(error), str(error)) for m, error in results.errors.items()} == {1: (ModelFailed, text)}


def test_a_duplicate_output_fails_its_request_only(python: Open) -> None:
    twice = "responses.append(pb_utils.InferenceResponse([pb_utils.Tensor('y', x)] * (2 if x[0, 0] == 2 else 1)))"
    results = python(executing(twice)).whole(rows(1, 2, 3))
    assert values(results) == [rows(1).tolist(), None, rows(3).tolist()]
    assert {m: str(error) for m, error in results.errors.items()} == {1: "model 'm' answered output 'y' twice"}


@pytest.mark.parametrize("returned", ["None", "[None] * len(requests)"])
def test_a_model_that_is_not_decoupled_may_respond_through_senders(python: Open, returned: str) -> None:
    later = (
        "import threading\nsender = request.get_response_sender()\n"
        "threading.Timer(0.01, sender.send, [pb_utils.InferenceResponse([pb_utils.Tensor('y', x)]), 1]).start()"
    )
    source = executing(later).replace("return responses", f"return {returned}")
    assert values(python(source).whole(rows(1, 2))) == [rows(1).tolist(), rows(2).tolist()]


def test_the_one_response_is_final_with_or_without_the_final_flag(python: Open) -> None:
    sends = "request.get_response_sender().send(pb_utils.InferenceResponse([pb_utils.Tensor('y', x)]))"
    source = executing(sends).replace("return responses", "return None")
    assert values(python(source).whole(rows(1, 2))) == [rows(1).tolist(), rows(2).tolist()]


@pytest.mark.parametrize("returned", ["None", "[None] * len(requests)"])
def test_a_sender_freed_without_a_response_fails_its_request_at_once(python: Open, returned: str) -> None:
    """A thread that fails frees its request and its sender."""
    given = "request.get_response_sender(), x"
    body = f"import threading\nthreading.Thread(target=self.answer, args=({given})).start()"
    method = """
    def answer(self, sender, x):
        if x[0, 0] != 2:
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor('y', x)]), 1)
    """
    source = executing(body, method).replace("return responses", f"return {returned}")
    results = python(source).whole(rows(1, 2, 3))
    assert values(results) == [rows(1).tolist(), None, rows(3).tolist()]
    assert {m: str(error) for m, error in results.errors.items()} == {
        1: "model 'm' let go of a response sender without having sent a response"
    }


def test_a_task_may_respond_after_execute_has_returned_and_may_fail(python: Open) -> None:
    body = "import asyncio\nself.task = asyncio.create_task(self.answer(request.get_response_sender(), x))"
    method = """
    async def answer(self, sender, x):
        import asyncio
        self.task = await asyncio.sleep(0.01)
        if x[0, 0] != 2:
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor('y', x)]), 1)
    """
    source = (
        executing(body, method).replace("return responses", "return None").replace("def execute", "async def execute")
    )
    model = python(source)
    assert values(model.whole(rows(1))) == [rows(1).tolist()]
    assert "let go of a response sender" in str(model.whole(rows(2)).errors[0])


def test_a_request_kept_by_a_thread_still_has_its_sender(python: Open) -> None:
    body = "import threading\nrequest.get_response_sender()\nthreading.Timer(0.05, self.answer, (request, x)).start()"
    method = """
    def answer(self, request, x):
        request.get_response_sender().send(pb_utils.InferenceResponse([pb_utils.Tensor('y', x)]), 1)
    """
    assert values(python(executing(body, method).replace("return responses", "return None")).whole(rows(1, 2))) == [
        rows(1).tolist(),
        rows(2).tolist(),
    ]


@pytest.mark.parametrize(
    ("sends", "text"),
    [
        ("sender.send()", "Inference Response object must be provided when the response flags is set to zero."),
        ("sender.send(flags=1)", "sent the final flag before any response"),
        ("sender.send(response, 2)", "Unsupported flag provided"),
        ("sender.send('no', 1)", "InferenceResponse expected, got str"),
    ],
)
def test_a_sender_follows_tritons_rules(python: Open, sends: str, text: str) -> None:
    body = "sender = request.get_response_sender(); response = pb_utils.InferenceResponse([pb_utils.Tensor('y', x)])\n"
    with pytest.raises(ModelFailed) as caught:
        python(executing(body + sends)).whole(rows(1))
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("sends", "text"),
    [
        ("sender.send(response); sender.send(response, 1)", "TritonModelException"),
        ("sender.send(response, 1); sender.send(response, 1)", "TritonModelException"),
        ("sender.send(response, 1); raise RuntimeError('afterwards')", "RuntimeError"),
    ],
)
def test_a_response_that_was_sent_before_the_model_raised_counts(
    python: Open, caplog: pytest.LogCaptureFixture, sends: str, text: str
) -> None:
    body = "if x[0, 0] == 1:\n    sender = request.get_response_sender()\n"
    body += "    response = pb_utils.InferenceResponse([pb_utils.Tensor('y', x)])\n    "
    results = python(executing(body + sends)).whole(rows(1, 2))
    assert values(results) == [rows(1).tolist(), None]
    assert f"{text} in a batch of 2 requests" in str(results.errors[1])  # of the request that had no response
    assert results.raised is results.errors[1]
    assert results.raised.raised is not None
    assert (results.raised.raised.take() or "").startswith("Traceback")
    assert not caplog.records  # the line about the request has the traceback


def test_an_object_that_is_no_response_fails_its_request_only(python: Open) -> None:
    results = python(executing(f"if x[0, 0] == 2:\n    responses.append(None)\nelse:\n    {answer('x')}")).whole(
        rows(1, 2)
    )
    assert values(results) == [rows(1).tolist(), None]
    assert str(results.errors[1]) == f"{NO_RESPONSE} '<class 'NoneType'>'. (model 'm', {RETURNS})"


@pytest.mark.parametrize("others", [answer("x"), "responses.append(x)"])
def test_a_returned_array_fails_its_request_with_the_expected_type(python: Open, others: str) -> None:
    results = python(executing(f"if x[0, 0] == 2:\n    responses.append(x)\nelse:\n    {others}")).whole(rows(1, 2))
    assert str(results.errors[1]) == f"{NO_RESPONSE} '<class 'numpy.ndarray'>'. (model 'm', {RETURNS})"
    assert list(results.errors) == ([1] if others == answer("x") else [0, 1])


def test_an_array_beside_a_response_through_a_sender_fails_its_request_only(python: Open) -> None:
    body = (
        "if x[0, 0] == 2:\n    responses.append(x)\nelse:\n"
        "    request.get_response_sender().send(pb_utils.InferenceResponse([pb_utils.Tensor('y', x)]), 1)\n"
        "    responses.append(None)"
    )
    results = python(executing(body)).whole(rows(1, 2))
    assert values(results) == [rows(1).tolist(), None]
    assert str(results.errors[1]) == f"{NO_RESPONSE} '<class 'numpy.ndarray'>'. (model 'm', {RETURNS})"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            "pb_utils.InferenceRequest(model_name='other', requested_output_names=['y'], inputs=[given]).exec()",
            "model 'other' cannot be called here: other models are called from execute",
        ),
        (
            "pb_utils.MetricFamily('m', 'd', pb_utils.MetricFamily.GAUGE)",
            "Error when creating MetricFamily: this is possible in initialize, execute and finalize",
        ),
        ("pb_utils.load_model('other')", "Failed to load model: this is possible in initialize, execute and finalize"),
    ],
)
def test_functions_that_need_a_server_raise_without_one(python: Open, body: str, text: str) -> None:
    with pytest.raises(ModelFailed) as caught:
        python(executing(body)).run({"x": rows(1)})
    assert text in str(caught.value)


# ------------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("class TritonPythonModel:\n  def execute(self, requests:\n", "m/1/model.py:2:"),
        ("class Model: pass\n", "m/1/model.py:1:1: model 'm' has no class TritonPythonModel (call class Model "),
        (
            "def execute(requests): ...\n",
            "m/1/model.py: model 'm' has no class TritonPythonModel (write a class TritonPythonModel with a method",
        ),
        ("import no_such_package\n", "model 'm' (m/1/model.py:1): import failed: ModuleNotFoundError: No module named"),
        (
            "from .helper import x\n",
            "import failed: ModuleNotFoundError: No module named '.helper' (it is neither beside",
        ),
        ("import no_such_package\n", "'no_such_package' (it is neither beside model.py nor in the Python environment"),
        ("class TritonPythonModel: pass\n", "class TritonPythonModel in m/1/model.py has no method execute"),
        (
            "class TritonPythonModel:\n  def initialize(self, args): raise OSError('no weights')\n  execute = 1",
            "model 'm' (m/1/model.py:2): initialize failed: OSError: no weights",
        ),
        (
            "class TritonPythonModel:\n  def initialize(self, args): open('weights.npy')\n  execute = 1",
            "'weights.npy' (a relative path starts at the server's folder; args['model_repository'] is the model's)",
        ),
        ("import sys; sys.exit(1)", "import failed: SystemExit: 1"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_reported_with_its_file(
    python: Open, repository: Repository, source: str, text: str
) -> None:
    with pytest.raises(FlowserveError) as caught:
        python(source)
    assert text in str(caught.value)
    assert str(repository.path) not in str(caught.value)


def test_an_inaccessible_file_is_reported_by_name(
    python: Open, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, **_: Any) -> Any:  # as for a user without permission for the folder
        raise PermissionError(13, "Permission denied", str(path))

    repository.write("m", FILE, HEAD + DOUBLE)
    config, files = config_of(inputs=[spec("x")], outputs=[spec("y")]), repository.files("m")
    backend = registry.find("python")
    assert isinstance(backend, Verifies)
    monkeypatch.setattr(Path, "stat", refused)
    monkeypatch.setattr(Path, "exists", refused)
    with pytest.raises(Invalid, match=r"failed to load 'm' version 1: m/1/model\.py cannot be read: Permission denied"):
        backend.verify(config, files)


def test_two_models_with_a_file_of_the_same_name_get_different_modules(python: Open, repository: Repository) -> None:
    body = "import helper\nfrom helper import mark\n" + executing(answer("x + helper.mark + mark"))
    models = []
    for name, mark in (("one", 1), ("two", 10)):
        repository.write(name, "1/helper.py", f"mark = {mark}\n")
        models.append(python(body, name=name))
    assert [values(model.run({"x": rows(0)})) for model in models] == [[rows(2).tolist()], [rows(20).tolist()]]
    assert "helper" not in sys.modules
    assert not any("/one/" in folder or "/two/" in folder for folder in sys.path)


def test_relative_imports_packages_and_the_models_own_folder_work(python: Open, repository: Repository) -> None:
    repository.write("m", "1/near.py", "mark = 1\n")
    repository.write("m", "1/parts/__init__.py", "from parts.inner import mark\n")
    repository.write("m", "1/parts/inner.py", "mark = 10\n")
    repository.write("m", "shared.py", "mark = 100\n")
    source = "from .near import mark as a\nimport parts, shared\n" + executing(
        answer("x + a + parts.mark + shared.mark")
    )
    assert values(python(source).run({"x": rows(0)})) == [rows(111).tolist()]


def test_files_beside_a_model_are_found_during_initialize_and_execute(python: Open, repository: Repository) -> None:
    repository.write("m", "1/late.py", "mark = 5\n")
    source = executing(
        f"import late\n{answer('x + late.mark + self.mark')}",
        "def initialize(self, args):",
        "    import late",
        "    self.mark = late.mark",
    )
    model = python(source)
    for _ in range(2):
        assert values(model.run({"x": rows(0)})) == [rows(10).tolist()]
    assert "late" not in sys.modules


def test_instances_of_one_model_share_nothing(python: Open) -> None:
    source = "count = [0]\n" + executing(f"count[0] += 1\n{answer('x + count[0]')}")
    first, second = python(source), python(source, instance="m_1")
    assert values(first.run({"x": rows(0)})) == [rows(1).tolist()]
    assert values(first.run({"x": rows(0)})) == [rows(2).tolist()]
    assert values(second.run({"x": rows(0)})) == [rows(1).tolist()]


def test_edited_files_are_read_again_and_no_caches_are_written(python: Open, repository: Repository) -> None:
    for mark in (1, 2, 3):  # within one second, of equal length: Python's own cache would not notice the change
        repository.write("m", "1/helper.py", f"mark = {mark}\n")
        repository.write("m", "1/parts/__init__.py", "")
        repository.write("m", "1/parts/inner.py", f"mark = {mark}\n")
        source = executing(answer(f"x + {mark} + a + b + inner.mark"))
        source = "from helper import mark as a\nfrom .helper import mark as b\nfrom parts import inner\n" + source
        assert values(python(source).run({"x": rows(0)})) == [rows(4 * mark).tolist()]
    assert list(repository.path.rglob("__pycache__")) == []


def test_a_closed_instance_leaves_no_modules(python: Open) -> None:
    before = set(sys.modules)
    python(HEAD + DOUBLE).instance.close()
    assert {name for name in set(sys.modules) - before if "flowserve_model" in name} == set()


def test_models_on_several_threads_have_separate_names_and_files(python: Open, repository: Repository) -> None:
    models = []
    for mark in range(4):
        repository.write(f"m{mark}", "1/helper.py", f"mark = {mark}\n")
        models.append(python("import helper\n" + executing(answer("x + helper.mark")), name=f"m{mark}"))
    wrong: list[int] = []

    def work(mark: int) -> None:
        wrong.extend(mark for _ in range(50) if values(models[mark].run({"x": rows(0)})) != [rows(mark).tolist()])

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize(
    ("options", "allowed"),
    [({}, False), ({"execution": "thread"}, False), ({"execution": "inline"}, True), ({"execution": "auto"}, True)],
)
def test_a_python_model_runs_inline_only_if_it_is_configured(
    repository: Repository, options: dict[str, str], allowed: bool
) -> None:
    repository.write("m", FILE, HEAD + DOUBLE)
    assert registry.find("python").load(config_of(), repository.files(), options).may_run_inline is allowed


# ---------------------------------------------------------------------------------------------------- completion


def complete(repository: Repository, body: str, config: ModelConfig | None = None) -> Completion:
    lines = "\n".join("        " + line for line in dedent(body).strip().splitlines())
    repository.write(
        "m",
        FILE,
        "class TritonPythonModel:\n    @staticmethod\n    def auto_complete_config(auto_complete_model_config):\n"
        f"        config = auto_complete_model_config\n{lines}\n",
    )
    return registry.find("python").complete(config or config_of(), repository.files())


FILL = """
config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [4]})
config.add_output({"name": "y", "data_type": "TYPE_STRING", "dims": [-1]})
config.set_max_batch_size(16)
config.set_dynamic_batching()
return config
"""


def test_a_model_completes_its_configuration(repository: Repository) -> None:
    found = complete(repository, FILL)
    assert found.inputs == (spec("x"),)
    assert found.outputs == (spec("y", [-1], DType.BYTES),)
    assert (found.max_batch_size, found.dynamic_batching) == (16, True)


def test_fields_that_the_user_wrote_are_kept(repository: Repository) -> None:
    written = config_of(inputs=[spec("x")], max_batch_size=2)
    written = replace(written, dynamic_batching=DynamicBatching(), json={**written.json, "dynamic_batching": {}})
    found = complete(repository, FILL, written)
    assert found.dynamic_batching is False
    assert found.inputs == (spec("x"),)


def test_a_model_may_raise_the_batch_size_that_the_user_wrote(repository: Repository) -> None:
    assert complete(repository, FILL, config_of(max_batch_size=2)).max_batch_size == 16


def test_a_model_without_auto_complete_config_is_not_imported(repository: Repository) -> None:
    repository.write("m", FILE, "raise RuntimeError('imported')\n")
    assert registry.find("python").complete(config_of(), repository.files()) == Completion()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("return None", "auto_complete_config function in model 'm' must return a valid pb.ModelConfig object"),
        (
            "config.add_input({'name': 'x'})",
            "ValueError: input added in auto_complete_config function lacks 'data_type",
        ),
        (
            "config.add_output({'name': 'y', 'data_type': 'TYPE_INT8', 'dims': [4], 'label_file': 'labels.txt'})",
            "has the property 'label_file', which outputs do not have (did you mean \"label_filename\"?)",
        ),
        (
            "config.add_input({'name': 'x', 'data_type': 'TYPE_INT8', 'dims': [4]})",
            "model configuration specified data_type TYPE_FP32, but in auto_complete_config function it has data_type ",
        ),
        (
            "config.add_input({'name': 'z', 'data_type': 'TYPE_INT8', 'dims': 4})",
            "input 'z' added in auto_complete_config function has dims 4, which are no list, as in [4]",
        ),
        ("config.add_input({'name': 'z', 'data_type': 'TYPE_INT8', 'dims': '4'})", "has dims '4', which are no list"),
        ("config.set_max_batch_size(1)", "configuration specified max_batch_size 2"),
        ("config.set_model_transaction_policy({'other': 1})", "unknown properties other"),
    ],
)
def test_a_completion_that_contradicts_the_user_is_refused(repository: Repository, body: str, text: str) -> None:
    with pytest.raises(FlowserveError) as caught:
        complete(repository, body, config_of(inputs=[spec("x")], max_batch_size=2))
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("config.add_input({'name': 5, 'data_type': 'TYPE_INT8', 'dims': [4]})", "input[0].name is 5 where text is ex"),
        ("config.add_input({'name': '\\ud800', 'data_type': 'TYPE_INT8', 'dims': [4]})", "input[0].name is '\\ud800'"),
        ("config.add_input({'name': 'x', 'data_type': [], 'dims': [4]})", "input[0].data_type is []"),
        (
            "config.add_input({'name': 'x', 'data_type': 'TYPE_INT8', 'dims': [2**70]})",
            "a list of integers is expected",
        ),
        ("config.add_input({'name': 'x', 'data_type': 'TYPE_INT8', 'dims': [1.5]})", "input[0].dims is [1.5]"),
        (
            "config.add_input({'name': 'x', 'data_type': 'TYPE_INT8', 'dims': [1], 'reshape': []})",
            "input[0].reshape is",
        ),
        (
            "config.add_output({'name': 'y', 'data_type': 'TYPE_INT8', 'dims': [1], 'label_filename': 5})",
            "label_filename",
        ),
        (
            "config.set_max_batch_size(2**40)",
            "max_batch_size is 1099511627776 where an integer from 0 to 2147483647 is",
        ),
        ("config.set_model_transaction_policy({'decoupled': 'false'})", "decoupled is 'false' where True or False is"),
        ("config._model_config = []", "the configuration is [] where a dictionary is expected"),
    ],
)
def test_a_completion_of_other_types_is_refused_by_its_field(repository: Repository, body: str, text: str) -> None:
    with pytest.raises(Invalid) as caught:
        complete(repository, f"{body}\nreturn config")
    assert str(caught.value).startswith("auto_complete_config function in model 'm': ")
    assert text in str(caught.value)


def test_modules_are_removed_while_other_threads_import(monkeypatch: pytest.MonkeyPatch) -> None:
    class Meanwhile(str):
        """A module name whose comparison lets another thread remove its own module meanwhile."""

        def __eq__(self, other: object) -> bool:
            sys.modules.pop("_of_another_thread", None)
            return super().__eq__(other)

        __hash__ = str.__hash__

    for name in (Meanwhile("_looked_at"), "_of_another_thread", "_model_7", "_model_7.model", "_model_70"):
        monkeypatch.setitem(sys.modules, name, ModuleType("module"))
    forget_model(ModuleType("_model_7.model"))
    assert "_model_70" in sys.modules
    assert not {"_model_7", "_model_7.model", "_of_another_thread"} & {*sys.modules}
