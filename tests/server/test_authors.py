"""Requests of a model.py to its server in every execution place: custom metrics, loading and unloading of models."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from flowserve.runtime.processes.children import SUPPORTED
from flowserve.testing.serve import Served
from tests.support.forked import serving

PLACES = ["thread", "inline", *(["process"] if SUPPORTED else [])]

CONFIG = """
backend: "python"
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""

HEAD = """
import gc, os, threading
import numpy as np
import triton_python_backend_utils as pb_utils

def raised(call, *arguments, **more):
    try:
        call(*arguments, **more)
    except pb_utils.TritonModelException as error:
        return str(error)
    return ""

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(float(request.inputs()[0].as_numpy()[0])) for request in requests]

    def answer(self, given):
        found = self.found(given)
        if isinstance(found, str):
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(found))
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([found], np.float32))])
"""

COUNTS = """
    def initialize(self, args):
        name = args["model_name"]
        self.families = {
            kind: pb_utils.MetricFamily(name=f"test_{kind.name.lower()}", description="for a test", kind=kind)
            for kind in (pb_utils.MetricFamily.COUNTER, pb_utils.MetricFamily.GAUGE, pb_utils.MetricFamily.HISTOGRAM)
        }
        counter, gauge, histogram = self.families.values()
        self.shared = counter.Metric()
        self.own = counter.Metric(labels={"model": name, "odd": 'a"b\\\\c'})
        self.gauge = gauge.Metric(labels={"model": name})
        self.sizes = histogram.Metric(labels={"model": name}, buckets=[1, 2.5])

    def found(self, given):
        if given < 0:
            os._exit(3)
        counter = self.families[pb_utils.MetricFamily.COUNTER]
        counter.Metric().increment(1)  # the same as `shared`, and gone at once
        thread = threading.Thread(target=self.own.increment, args=(given,))
        thread.start()
        thread.join()
        self.gauge.set(given)
        self.gauge.increment(-0.5)
        self.sizes.observe(given)
        assert self.gauge.value() == given - 0.5
        return self.shared.value()
"""

# Every response is "" if nothing went wrong.
RULES = """
    def initialize(self, args):
        self.name = "rules_" + args["model_name"]

    def found(self, given):
        counter = pb_utils.MetricFamily(self.name, "first", pb_utils.COUNTER)
        gauge = pb_utils.MetricFamily(self.name + "_gauge", "a gauge", pb_utils.GAUGE)
        histogram = pb_utils.MetricFamily(self.name + "_sizes", "sizes", pb_utils.MetricFamily.HISTOGRAM)
        one, other, sizes = counter.Metric(labels={"a": "1"}), gauge.Metric(), histogram.Metric(buckets=[])
        one.increment(np.float32(2.5))
        other.set(7)
        sizes.observe(1)
        wrong = [
            (one.increment, [-1], "Failed to increment metric value: TRITONSERVER_METRIC_KIND_COUNTER can only be "
             "incremented monotonically by non-negative values."),
            (one.set, [1], "Failed to set metric value: TRITONSERVER_METRIC_KIND_COUNTER does not support Set"),
            (other.observe, [1], "TRITONSERVER_METRIC_KIND_GAUGE does not support Observe"),
            (sizes.value, [], "TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Value"),
            (pb_utils.MetricFamily, [self.name, "", pb_utils.GAUGE], "exists already, as a counter and not as a gauge"),
            (pb_utils.MetricFamily, ["nv_inference_count", "", pb_utils.COUNTER], "are the server's own"),
            (pb_utils.MetricFamily, ["m", "", "gauge"], "a kind such as MetricFamily.GAUGE"),
            (histogram.Metric, [], "a histogram has buckets"),
            (histogram.Metric, [{}, [2, 1]], "the buckets of a histogram rise"),
            (counter.Metric, [{}, [1]], "a counter has no buckets"),
            (counter.Metric, [{"a": 1}], "labels are a dictionary of texts"),
            (counter.Metric, [{"a-b": "1"}], "a metric cannot have a label 'a-b'"),
        ]
        for call, arguments, text in wrong:
            said = raised(call, *arguments)
            if text not in said:
                return f"{text!r} is not in {said!r}"
        again = pb_utils.MetricFamily(self.name, "second", pb_utils.COUNTER)
        again.Metric(labels={"a": "1"}).increment(1)
        if one.value() != 3.5:
            return f"two families of one name count {one.value()}"
        del counter, call, wrong
        gc.collect()
        for call in (lambda: one.increment(1), one.value):
            said = raised(call)
            if "Invalid metric operation as the corresponding 'MetricFamily' has been deleted." not in said:
                return said
        if again.Metric(labels={"a": "1"}).value() != 3.5:
            return "what a deleted family counted is lost to the other"
        return 1.0
"""

LOADS = """
    def initialize(self, args):
        self.plain = "plain_for_" + args["model_name"]
        before = pb_utils.is_model_ready(self.plain)
        pb_utils.load_model(model_name=self.plain)
        self.was = [before, pb_utils.is_model_ready(self.plain, "1"), pb_utils.is_model_ready(self.plain, "2")]

    def found(self, given):
        if given == 0:
            return str(self.was)
        if given == 1:
            return raised(pb_utils.load_model, "nobody")
        if given == 2:
            return raised(pb_utils.is_model_ready, "nobody", "one")
        if given == 3:
            return raised(pb_utils.load_model, "nobody", "", {"file:1/model.py": "text"})
        if given == 9:
            return raised(pb_utils.load_model, "nobody", "", {5: b"text"})
        if given == 4:
            pb_utils.unload_model(self.plain)
            gone = pb_utils.is_model_ready(self.plain)
            with open(os.path.join(pb_utils.get_model_dir(), "twice.py"), "rb") as file:
                files = {"file:1/model.py": file.read()}
            config = '{"backend": "python", "parameters": {"execution": {"string_value": "thread"}}, '
            config += ', '.join(f'"{side}": [{{"name": "{name}", "data_type": "TYPE_FP32", "dims": [1]}}]'
                                for side, name in (("input", "IN"), ("output", "OUT"))) + '}'
            pb_utils.load_model(self.plain, config=config, files=files)
            return str([gone, pb_utils.is_model_ready(self.plain)])
        pb_utils.load_model(os.path.basename(os.path.dirname(pb_utils.get_model_dir())))
        return "loaded itself again"
"""
ENDS = """
    def initialize(self, args):
        self.plain = "plain_for_loads_" + args["model_name"].rpartition("_")[2]
        self.family = pb_utils.MetricFamily("test_ends", "how many ended", pb_utils.COUNTER)

    def found(self, given):
        return given

    def finalize(self):
        self.family.Metric().increment(1)
        if self.family.Metric().value() == 1:
            pb_utils.load_model(self.plain)
"""
PLAIN = "    def found(self, given):\n        return given\n"
TWICE = "    def found(self, given):\n        return 2 * given\n"
WANTS = "    def initialize(self, args):\n        pb_utils.load_model('{}')\n\n" + PLAIN


def model(body: str) -> str:
    return HEAD + body


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("authors")

    def write(name: str, body: str, place: str) -> None:
        folder = repository / name / "1"
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(model(body))
        (folder / "twice.py").write_text(model(TWICE))
        parameter = f'parameters {{ key: "execution" value: {{ string_value: "{place}" }} }}'
        (folder.parent / "config.pbtxt").write_text(CONFIG + parameter)

    for place in PLACES:
        write(f"counts_{place}", COUNTS, place)
        write(f"rules_{place}", RULES, place)
        write(f"loads_{place}", LOADS, place)
        write(f"ends_{place}", ENDS, place)
        write(f"plain_for_loads_{place}", PLAIN, "thread")
        write(f"wants_itself_{place}", WANTS.format(f"wants_itself_{place}"), place)
        write(f"hen_{place}", WANTS.format(f"egg_{place}"), place)
        write(f"egg_{place}", WANTS.format(f"hen_{place}"), place)
    with serving(repository, "--model-control-mode", "explicit") as served:
        yield served


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[triton.InferenceServerClient]:
    client = triton.InferenceServerClient(server.address)
    yield client
    client.close()


def asked(client: triton.InferenceServerClient, name: str, given: float) -> float:
    tensor = triton.InferInput("IN", [1], "FP32")
    tensor.set_data_from_numpy(np.array([given], np.float32))
    return float(client.infer(name, [tensor]).as_numpy("OUT")[0])


def text_response(client: triton.InferenceServerClient, name: str, given: float) -> str:
    """The text that the model answers with."""
    with pytest.raises(InferenceServerException) as caught:
        asked(client, name, given)
    return str(caught.value.message())


def metrics(server: Served) -> list[str]:
    with urllib.request.urlopen(f"http://{server.address}/metrics") as answer:
        text: str = answer.read().decode()
    lines = text.splitlines()
    return [
        line for line in lines if line.removeprefix("# HELP ").removeprefix("# TYPE ").startswith(("test_", "rules_"))
    ]


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_metrics_of_models_are_shown_beside_the_servers_and_shared_by_name(
    server: Served, client: triton.InferenceServerClient
) -> None:
    for place in PLACES:
        client.load_model(f"counts_{place}")
    assert "test_counter 0" in metrics(server)
    for i, place in enumerate(PLACES):
        assert asked(client, f"counts_{place}", 2.0) == i + 1
    shown = metrics(server)
    assert shown[:2] == ["# HELP test_counter for a test", "# TYPE test_counter counter"]
    assert f"test_counter {len(PLACES)}" in shown
    for place in PLACES:
        model = f'model="counts_{place}"'
        assert f'test_counter{{{model},odd="a\\"b\\\\c"}} 2' in shown
        assert f"test_gauge{{{model}}} 1.5" in shown
        assert f'test_histogram_bucket{{{model},le="2.5"}} 1' in shown
        assert f"test_histogram_sum{{{model}}} 2" in shown
    for place in PLACES:
        client.unload_model(f"counts_{place}")
        assert not [line for line in metrics(server) if f"counts_{place}" in line]
    assert metrics(server) == []


@pytest.mark.skipif(not SUPPORTED, reason="needs processes of their own")
def test_a_restarted_process_starts_its_metrics_at_zero_without_decreasing_shared_counters(
    server: Served, client: triton.InferenceServerClient
) -> None:
    client.load_model("counts_process")
    client.load_model("counts_thread")
    assert [asked(client, "counts_process", 3.0) for _ in range(2)] == [1, 2]
    assert asked(client, "counts_thread", 3.0) == 3
    assert "exit status 3" in text_response(client, "counts_process", -1.0)
    until(lambda: client.is_model_ready("counts_process"))
    shown = metrics(server)
    assert 'test_gauge{model="counts_process"} 0' in shown
    assert 'test_histogram_count{model="counts_process"} 0' in shown
    assert "test_counter 3" in shown  # the other model still uses it: it must not decrease
    assert asked(client, "counts_process", 3.0) == 4
    client.unload_model("counts_process")
    client.unload_model("counts_thread")
    assert metrics(server) == []


@pytest.mark.parametrize("place", PLACES)
def test_an_invalid_metric_operation_is_refused_with_tritons_message(
    server: Served, client: triton.InferenceServerClient, place: str
) -> None:
    client.load_model(f"rules_{place}")
    for _ in range(3):
        assert asked(client, f"rules_{place}", 1.0) == 1.0
    assert metrics(server) == []  # its families were removed with the objects
    client.unload_model(f"rules_{place}")


@pytest.mark.parametrize("place", PLACES)
def test_a_model_loads_and_unloads_others(client: triton.InferenceServerClient, place: str) -> None:
    name, plain = f"loads_{place}", f"plain_for_loads_{place}"
    client.load_model(name)
    assert text_response(client, name, 0) == "[False, True, False]"
    assert asked(client, plain, 7.0) == 7.0
    assert "failed to get model version from specified version string 'one'" in text_response(client, name, 2)
    assert (
        text_response(client, name, 3)
        == "failed to load model 'nobody', the content of 'file:1/model.py' should be bytes"
    )
    assert text_response(client, name, 9) == "failed to load model 'nobody', the path of a file should be a string: 5"
    if place == "inline":
        reason = "while it runs on the event loop, which does that; use --python-execution process or thread"
        assert reason in text_response(client, name, 1)
    else:
        not_there = "Failed to load model: failed to load 'nobody', failed to poll from model repository"
        assert text_response(client, name, 1).startswith(not_there)
        assert text_response(client, name, 4) == "[False, True]"
        assert asked(client, plain, 7.0) == 14.0
        assert text_response(client, name, 5) == "loaded itself again"
    client.unload_model(name)
    client.unload_model(plain)


@pytest.mark.parametrize("place", PLACES)
def test_a_model_that_ends_may_still_count_and_load(
    server: Served, client: triton.InferenceServerClient, place: str
) -> None:
    client.load_model(f"ends_{place}")
    assert not client.is_model_ready(f"plain_for_loads_{place}")
    client.unload_model(f"ends_{place}")
    assert client.is_model_ready(f"plain_for_loads_{place}")
    assert metrics(server) == []
    client.unload_model(f"plain_for_loads_{place}")


@pytest.mark.parametrize("place", PLACES)
def test_models_that_wait_for_each_other_during_load_are_refused(
    client: triton.InferenceServerClient, place: str
) -> None:
    for name, loads in ((f"wants_itself_{place}", f"wants_itself_{place}"), (f"hen_{place}", f"egg_{place}")):
        with pytest.raises(
            InferenceServerException, match=f"model '{loads}' is being loaded, and this would have to wait"
        ):
            client.load_model(name)
        assert not client.is_model_ready(name)


def test_models_may_load_models_only_if_clients_may(tmp_path: Path) -> None:
    folder = tmp_path / "loads" / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(model(WANTS.format("other")))
    (folder.parent / "config.pbtxt").write_text(CONFIG)
    with serving(tmp_path, "--exit-on-error", "false") as served:
        assert "explicit model load / unload is not allowed if polling is enabled" in served.log
