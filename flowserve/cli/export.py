"""`flowserve export kubernetes`: manifests that serve a repository in a cluster.

Decides what a deployment in Kubernetes needs: probes, drain, resources from the compiled graphs (GPUs of the instance
groups, memory of the model files), autoscaling by `flowserve_load_ratio`, and where the models come from. Does not talk
to a cluster. The manifests are text; docs/deployment.md says what each is for.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from flowserve.cli.stores import open_mirrors
from flowserve.config.types import ModelConfig
from flowserve.errors import Invalid, Problems, problems_of
from flowserve.runtime.loading.reading import read_apart

FIRST_LINE: Final = "# Written by `flowserve export kubernetes`; not applied to a cluster yet."
NAME: Final = re.compile(r"[a-z]([a-z0-9-]{0,51}[a-z0-9])?")
HTTP, GRPC, METRICS = 8000, 8001, 8002
DRAIN_DELAY_S: Final = 5
EXIT_TIMEOUT_S: Final = 30
LOAD_TARGET: Final = 0.7
_MIB: Final = 1 << 20
_OF_THE_SERVER: Final = 512  # MiB, besides the models' files
_OF_FILES: Final = 3  # times their bytes: as read, as loaded, and what they compute with


def execute(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Write the manifests. Raises Invalid, and Problems of the repository."""
    name, folder = arguments.name, arguments.output
    if not NAME.fullmatch(name):
        raise Invalid(f"--name {name!r}: small letters, digits and -, a letter first, at most 53")
    source = next((str(one) for one in arguments.repositories if not isinstance(one, Path)), "")
    if source and len(arguments.repositories) > 1:
        raise Invalid("a repository in a store is exported alone")
    for mirror in open_mirrors(arguments):
        mirror.update()
    reading = read_apart(arguments.repositories)
    failed = [problem for error in reading.resolution.failed.values() for problem in problems_of(error)]
    if failed:
        raise Problems(failed)
    made = manifests(
        name,
        arguments.image,
        [*reading.configs.values()],
        sum(map(_bytes_below, arguments.repositories)),
        storage=source,
        claim=arguments.claim,
        replicas=(arguments.min_replicas, arguments.max_replicas),
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, documents in made.items():
            (folder / file).write_text(to_yaml(documents))
    except OSError as error:
        raise Invalid(f"{folder} cannot be written: {error.strerror}") from None
    if not arguments.quiet:
        print(f"{len(made)} manifests in {folder}; next: kubectl apply -k {folder}")
    return 0


def _bytes_below(folder: Path) -> int:
    found = 0
    for home, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [one for one in folders if one != "__pycache__"]
        paths = (os.path.join(home, name) for name in names)
        found += sum(os.stat(path).st_size for path in paths if os.path.exists(path))
    return found


def manifests(
    name: str,
    image: str,
    configs: Sequence[ModelConfig],
    model_bytes: int,
    *,
    storage: str = "",
    claim: str = "",
    replicas: tuple[int, int] = (1, 4),
) -> dict[str, list[dict[str, Any]]]:
    """The documents of each file. The models come from `storage`, a URL, or from the volume of `claim`."""
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/managed-by": "kustomize"}
    metadata = {"name": name, "labels": labels}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata,
        "spec": {
            "selector": {"matchLabels": {"app.kubernetes.io/name": name}},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": {
                "metadata": {"labels": labels},
                "spec": _pod(image, configs, model_bytes, storage=storage, claim=claim),
            },
        },
    }
    ports = [("http", HTTP), ("grpc", GRPC), ("metrics", METRICS)]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "selector": {"app.kubernetes.io/name": name},
            "ports": [{"name": word, "port": port, "targetPort": word} for word, port in ports],
        },
    }
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata,
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {"app.kubernetes.io/name": name}}},
    }
    monitor = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": metadata,
        "spec": {
            "selector": {"matchLabels": {"app.kubernetes.io/name": name}},
            "podMetricsEndpoints": [{"port": "metrics", "interval": "15s"}],
        },
    }
    resources = ["deployment.yaml", "service.yaml", "disruption-budget.yaml"]
    kustomization = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": resources}
    return {
        "kustomization.yaml": [kustomization],
        "deployment.yaml": [deployment],
        "service.yaml": [service],
        "disruption-budget.yaml": [budget],
        "pod-monitor.yaml": [monitor],
        "autoscaler.yaml": [_autoscaler(name, metadata, replicas)],
        "keda.yaml": [_scaled_object(name, metadata, replicas)],
    }


def _pod(image: str, configs: Sequence[ModelConfig], model_bytes: int, *, storage: str, claim: str) -> dict[str, Any]:
    command = ["run", storage or "/models", "--http-address=0.0.0.0", f"--http-port={HTTP}"]
    command += ["--allow-grpc=true", "--grpc-address=0.0.0.0", f"--grpc-port={GRPC}", f"--metrics-port={METRICS}"]
    command += [f"--drain-delay-secs={DRAIN_DELAY_S}", f"--exit-timeout-secs={EXIT_TIMEOUT_S}"]
    command += ["--repository-cache=/cache", "--log-format=json"]
    mebibytes = math.ceil((_OF_THE_SERVER + _OF_FILES * model_bytes / _MIB) / 64) * 64
    limits: dict[str, Any] = {"memory": f"{2 * mebibytes}Mi"}
    if gpus := _gpus(configs):
        limits["nvidia.com/gpu"] = gpus
    mounts: list[dict[str, Any]] = [{"name": "cache", "mountPath": "/cache"}]
    volumes: list[dict[str, Any]] = [{"name": "cache", "emptyDir": {}}]
    if not storage:
        mounts.append({"name": "models", "mountPath": "/models", "readOnly": True})
        volumes.append({"name": "models", "persistentVolumeClaim": {"claimName": claim or "models", "readOnly": True}})
    ready = {"httpGet": {"path": "/v2/health/ready", "port": "http"}}
    return {
        "terminationGracePeriodSeconds": DRAIN_DELAY_S + EXIT_TIMEOUT_S + 10,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 10001, "fsGroup": 10001},
        "containers": [
            {
                "name": "flowserve",
                "image": image,
                "args": command,
                "ports": [
                    {"name": word, "containerPort": port}
                    for word, port in (("http", HTTP), ("grpc", GRPC), ("metrics", METRICS))
                ],
                # Models may take minutes to load; liveness never depends on them.
                "startupProbe": {**ready, "periodSeconds": 5, "failureThreshold": 120},
                "readinessProbe": {**ready, "periodSeconds": 2},
                "livenessProbe": {
                    "httpGet": {"path": "/v2/health/live", "port": "http"},
                    "periodSeconds": 10,
                    "timeoutSeconds": 5,
                },
                "resources": {"requests": {"cpu": "1", "memory": f"{mebibytes}Mi"}, "limits": limits},
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": [*mounts, {"name": "scratch", "mountPath": "/tmp"}],
            }
        ],
        "volumes": [*volumes, {"name": "scratch", "emptyDir": {}}],
    }


def _gpus(configs: Sequence[ModelConfig]) -> int:
    """The number of GPUs that the instance groups name; 1 if one may be on any."""
    groups = [group for config in configs for group in config.instance_groups if group.kind == "KIND_GPU"]
    named = {gpu for group in groups for gpu in group.gpus}
    return len(named) if named else int(bool(groups))


def _autoscaler(name: str, metadata: Mapping[str, Any], replicas: tuple[int, int]) -> dict[str, Any]:
    metric = {"metric": {"name": "flowserve_load_ratio"}, "target": {"type": "AverageValue", "averageValue": "700m"}}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": metadata,
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
            "minReplicas": replicas[0],
            "maxReplicas": replicas[1],
            "metrics": [{"type": "Pods", "pods": metric}],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 300}},
        },
    }


def _scaled_object(name: str, metadata: Mapping[str, Any], replicas: tuple[int, int]) -> dict[str, Any]:
    trigger = {
        "type": "prometheus",
        "metadata": {
            "serverAddress": "http://prometheus-operated:9090",
            "query": f'sum(max by (pod) (flowserve_load_ratio{{pod=~"{name}-.*"}}))',
            "threshold": str(LOAD_TARGET),
        },
    }
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": metadata,
        "spec": {
            "scaleTargetRef": {"name": name},
            "minReplicaCount": replicas[0],
            "maxReplicaCount": replicas[1],
            "cooldownPeriod": 300,
            "triggers": [trigger],
        },
    }


# ---------------------------------------------------------------------------------------------- YAML

_PLAIN: Final = re.compile(r"[A-Za-z/][\w./-]*")
_WORDS: Final = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n"})


def to_yaml(documents: Sequence[Any], first_line: str = FIRST_LINE) -> str:
    """Dicts, lists, texts, numbers and truth values as YAML."""
    return first_line + "\n" + "---\n".join("".join(_lines(document, "")) for document in documents)


def _lines(value: Any, indent: str) -> list[str]:
    found = []
    pairs = value.items() if isinstance(value, dict) else ((None, one) for one in value)
    for key, one in pairs:
        mark = "- " if key is None else f"{_scalar(key)}:"
        if isinstance(one, dict | list) and one:
            inner = _lines(one, indent + "  ")
            if key is None:
                found += [indent + "- " + inner[0].lstrip(), *inner[1:]]
            else:
                found += [f"{indent}{mark}\n", *inner]
        else:
            text = ("{}" if isinstance(one, dict) else "[]") if isinstance(one, dict | list) else _scalar(one)
            found.append(f"{indent}{mark}{text if key is None else ' ' + text}\n")
    return found


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) and value.lower() not in _WORDS else json.dumps(value)
    return json.dumps(value)
