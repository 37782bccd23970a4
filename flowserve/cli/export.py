"""`flowserve export kubernetes`: manifests that serve a repository in a cluster.

Decides what a deployment in Kubernetes needs: probes, drain, resources from the compiled graphs (GPUs of the instance
groups, memory of the model files), autoscaling by `flowserve_load_ratio`, and where the models come from. Does not talk
to a cluster. The files of `manifests/` are the templates; docs/deployment.md says what each is for.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Final

from flowserve.cli.stores import open_mirrors
from flowserve.config.types import ModelConfig
from flowserve.errors import Invalid, Problems, problems_of
from flowserve.runtime.loading.reading import read_apart

TEMPLATES: Final = Path(__file__).with_name("manifests")
NAME: Final = re.compile(r"[a-z]([a-z0-9-]{0,51}[a-z0-9])?")
_MIB: Final = 1 << 20
_OF_THE_SERVER: Final = 512  # MiB, besides the models' files
_OF_FILES: Final = 3  # times their bytes: as read, as loaded, and what they compute with

# Lines of deployment.yaml that are there only in some deployments.
_GPUS: Final = """
              nvidia.com/gpu: {count}"""
_MODELS_MOUNT: Final = """
            - name: models
              mountPath: /models
              readOnly: true"""
_MODELS_VOLUME: Final = """
        - name: models
          persistentVolumeClaim:
            claimName: {claim}
            readOnly: true"""


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
        for file, text in made.items():
            (folder / file).write_text(text, encoding="utf-8")
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
) -> dict[str, str]:
    """The text of each file. The models come from `storage`, a URL, or from the volume of `claim`."""
    mebibytes = math.ceil((_OF_THE_SERVER + _OF_FILES * model_bytes / _MIB) / 64) * 64
    gpus = _gpus(configs)
    words = {
        "name": name,
        "image": json.dumps(image),
        "source": json.dumps(storage or "/models"),
        "memory": f"{mebibytes}Mi",
        "memory_limit": f"{2 * mebibytes}Mi",
        "gpus": _GPUS.format(count=gpus) if gpus else "",
        "models_mount": "" if storage else _MODELS_MOUNT,
        "models_volume": "" if storage else _MODELS_VOLUME.format(claim=json.dumps(claim or "models")),
        "min_replicas": str(replicas[0]),
        "max_replicas": str(replicas[1]),
    }
    return {path.name: Template(path.read_text(encoding="utf-8")).substitute(words) for path in TEMPLATES.iterdir()}


def _gpus(configs: Sequence[ModelConfig]) -> int:
    """The number of GPUs that the instance groups name; 1 if one may be on any."""
    groups = [group for config in configs for group in config.instance_groups if group.kind == "KIND_GPU"]
    named = {gpu for group in groups for gpu in group.gpus}
    return len(named) if named else int(bool(groups))
