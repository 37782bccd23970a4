"""The files of deploy/: what can be known of them without a cluster, and that what they ask of a server is there."""

from __future__ import annotations

import importlib.util
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from flowserve.cli.export import manifests
from flowserve.cli.main import main
from flowserve.cli.options import run_arguments
from flowserve.config.types import InstanceGroup, ModelConfig, SourceMap
from flowserve.testing.serve import Served, serving

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
YAML = [*DEPLOY.rglob("*.yaml")]


def parsed(text: str) -> list[Any]:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML, which schemathesis installs")
    return [*yaml.safe_load_all(text)]


def commands(document: Any) -> Iterator[list[str]]:
    """The arguments of every container of a manifest."""
    if isinstance(document, dict):
        if isinstance(document.get("args"), list) and document["args"][:1] == ["run"]:
            yield document["args"]
        for one in document.values():
            yield from commands(one)
    elif isinstance(document, list):
        for one in document:
            yield from commands(one)


def test_every_file_says_in_its_first_line_that_it_was_not_run() -> None:
    for path in [*YAML, *DEPLOY.glob("Dockerfile*"), *DEPLOY.glob("*.service")]:
        first = path.read_text().splitlines()[0]
        assert re.search(r"[Nn]ot (built|started|installed|applied|loaded)", first), path


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.relative_to(DEPLOY).as_posix())
def test_a_manifest_is_yaml_and_its_server_has_the_options(path: Path) -> None:
    for document in parsed(path.read_text()):
        assert isinstance(document, dict)
        for words in commands(document):
            run_arguments(*words[1:])


def test_the_manifests_are_those_that_the_command_writes(tmp_path: Path) -> None:
    assert main(["-q", "export", "kubernetes", str(ROOT / "graphs"), "-o", str(tmp_path)]) == 0
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_text() for path in (DEPLOY / "kubernetes").iterdir()}
    (kustomization,) = parsed(written["kustomization.yaml"])
    assert {*kustomization["resources"]} <= written.keys()


def test_a_repository_in_a_store_needs_no_volume() -> None:
    files = manifests("m", "flowserve:cpu", (), 100 << 20, storage="s3://bucket/graphs")
    (deployment,) = parsed(files["deployment.yaml"])
    pod = deployment["spec"]["template"]["spec"]
    assert [volume["name"] for volume in pod["volumes"]] == ["cache", "scratch"]
    (container,) = pod["containers"]
    assert container["args"][:2] == ["run", "s3://bucket/graphs"]
    assert container["resources"]["requests"]["memory"] == "832Mi"


def test_the_words_of_a_command_stay_text_and_gpus_are_counted() -> None:
    group = InstanceGroup("a", kind="KIND_GPU", gpus=(0, 3))
    config = ModelConfig("m", "python", "", 0, (), (), SourceMap("m"), instance_groups=(group,))
    files = manifests("on", 'a: "b" #c', (config,), 0, claim="null", replicas=(2, 3))
    made = {name: parsed(text)[0] for name, text in files.items()}
    assert made["autoscaler.yaml"]["spec"]["scaleTargetRef"]["name"] == "on"
    assert made["service.yaml"]["spec"]["selector"] == {"app.kubernetes.io/name": "on"}
    assert (made["keda.yaml"]["spec"]["minReplicaCount"], made["keda.yaml"]["spec"]["maxReplicaCount"]) == (2, 3)
    assert made["keda.yaml"]["spec"]["triggers"][0]["metadata"]["query"] == (
        'sum(max by (pod) (flowserve_load_ratio{pod=~"on-.*"}))'
    )
    pod = made["deployment.yaml"]["spec"]["template"]["spec"]
    assert pod["volumes"][1]["persistentVolumeClaim"]["claimName"] == "null"
    (container,) = pod["containers"]
    assert container["image"] == 'a: "b" #c'
    assert container["resources"]["limits"] == {"memory": "1024Mi", "nvidia.com/gpu": 2}


def test_a_wrong_name_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["export", "kubernetes", str(ROOT / "graphs"), "--name", "No_Name", "-o", str(tmp_path / "x")]
    assert main(words) == 1
    assert "--name 'No_Name': small letters" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.gpu"])
def test_an_image_copies_what_is_there_and_runs_as_a_user(name: str) -> None:
    lines = re.sub(r"\\\n", " ", (DEPLOY / name).read_text()).splitlines()
    steps = [line.split(None, 1) for line in lines if line and not line.startswith("#")]
    words = [word for word, _ in steps]
    assert words.count("FROM") == 2
    assert "ADD" not in words
    for word, rest in steps:
        if word == "COPY" and "--from" not in rest:
            assert all((ROOT / source).exists() for source in rest.split()[:-1]), rest
    assert words.index("USER") < words.index("CMD")
    assert dict(steps)["USER"] == "10001"
    command = json.loads(dict(steps)["ENTRYPOINT"]) + json.loads(dict(steps)["CMD"])
    assert command[:2] == ["flowserve", "run"]
    run_arguments(*command[2:])
    extras = re.findall(r"\.\[([\w,]+)\]", dict(steps)["RUN"] + " ".join(rest for _, rest in steps))
    text = (ROOT / "pyproject.toml").read_text()
    assert all(f"\n{extra} = [" in text for extra in extras[0].split(","))


def test_the_unit_of_systemd_has_options_of_the_server() -> None:
    (line,) = re.findall(r"^ExecStart=(.*)$", (DEPLOY / "flowserve.service").read_text(), re.MULTILINE)
    run_arguments(*line.split()[2:])


def generated() -> Any:
    spec = importlib.util.spec_from_file_location("generate", DEPLOY / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_dashboard_is_that_of_the_script() -> None:
    module = generated()
    assert json.loads(module.DASHBOARD.read_text()) == module.dashboard(), "run: python deploy/generate.py"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(ROOT / "graphs", "--model-control-mode", "explicit", "--load-model", "detect_language") as one:
        yield one


@pytest.mark.server
def test_every_expression_asks_for_metrics_and_labels_that_a_server_has(served: Served) -> None:
    module = generated()
    expressions = [target["expr"] for panel in module.dashboard()["panels"] for target in panel.get("targets", ())]
    (alerts,) = parsed((DEPLOY / "prometheus/alerts.yaml").read_text())
    expressions += [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(httpx.get(f"{served.base_url}/metrics", verify=False).text):
        for sample in family.samples:
            labels.setdefault(sample.name.removesuffix("_total"), set()).update(sample.labels)
    for expression in expressions:
        names = re.findall(r"\b(?:nv|flowserve)_\w+", expression)
        assert names
        for name in names:
            assert name.removesuffix("_total") in labels, name
        wanted = {word for by in re.findall(r"by \(([\w, ]+)\)", expression) for word in by.split(", ")}
        wanted |= {*re.findall(r"\{(\w+)=~", expression)}
        assert wanted <= set.union(*(labels[name.removesuffix("_total")] for name in names)), expression


@pytest.mark.server
def test_a_server_that_is_stopped_serves_on_for_the_drain_delay_and_is_not_ready() -> None:
    with serving(
        ROOT / "graphs", "--model-control-mode=explicit", "--load-model=detect_language", "--drain-delay-secs", "2"
    ) as served:
        began = time.monotonic()
        stopped: list[int] = []
        thread = threading.Thread(target=lambda: stopped.append(served.stop()))
        thread.start()
        while httpx.get(f"{served.base_url}/v2/health/ready", verify=False).status_code == 200:
            assert time.monotonic() - began < 1.5
        body = {"inputs": [{"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": ["guten Morgen"]}]}
        answer = httpx.post(f"{served.base_url}/v2/models/detect_language/infer", json=body, verify=False)
        assert answer.status_code == 200, answer.text
        assert httpx.get(f"{served.base_url}/v2/health/live", verify=False).status_code == 200
        thread.join(30)
    assert stopped == [0]
    assert time.monotonic() - began >= 2
