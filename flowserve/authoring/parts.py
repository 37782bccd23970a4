"""Parts of a graph that are files: an ONNX file, or the folder of a deployment.

Decides: such a model is read when it is named, because its tensors must be known for wiring, and its errors are
reported at that line of Python. A single ONNX file gets a private folder for this process. Callers: user programs,
`authoring/files`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from flowserve.backends import registry
from flowserve.config.load import CONFIG_FILE
from flowserve.config.parse import config_text
from flowserve.config.types import SourceMap
from flowserve.errors import Invalid, Place, Problem, Problems
from flowserve.graph.builder import Part, calling_line
from flowserve.repository.layout import is_model_folder, model_folder_at
from flowserve.repository.override import PrivateFolder, check_name
from flowserve.repository.read import ReadModel, examine
from flowserve.runtime.loading.completion import complete
from flowserve.runtime.loading.reading import verify


class FolderModel(Part):
    """A model in a folder `path`, laid out as in a repository."""

    def __init__(self, path: Path, place: Place, private: PrivateFolder | None = None) -> None:
        self.name = path.name
        self.path = path
        self.place = place
        self._private = private  # owns the folder, which is removed with it
        self.read = self._read()
        config = self.read.config
        self.inputs, self.outputs, self.max_batch_size = config.inputs, config.outputs, config.max_batch_size

    def __repr__(self) -> str:
        return f"<model {self.name!r} of {self.read.config.backend}>"

    def _read(self) -> ReadModel:
        if not is_model_folder(self.path):
            text = f"'{self.path}' is no model's folder: neither {CONFIG_FILE} nor a version folder is in it"
            raise Problems([Problem(text, self.place, "B4")])
        try:
            read = examine(model_folder_at(self.path), registry.default_files(), complete).valid()
            verify(read)
        except Problems as problems:
            if self._private is None:
                raise
            # The place is in a generated file; report the user's call instead.
            raise Problems([replace(problem, place=self.place) for problem in problems.problems]) from None
        if self._private is not None:
            source = SourceMap(self.place.file, dict.fromkeys(read.config.json, self.place))
            read = replace(read, config=replace(read.config, source=source))
        if read.config.is_ensemble:
            text = f"'{self.path}' is the folder of a graph"
            raise Problems([Problem(text, self.place, "B4", "flowserve.Graph.load makes it a part of another")])
        return read


def onnx_model(
    file: str | Path,
    *,
    name: str = "",
    max_batch_size: int | None = None,
    max_queue_delay_us: int = 0,
    instances: int = 0,
) -> FolderModel:
    """The model of an ONNX file, with the file's tensors. Blocks while it is read. Raises Problems.

    `name` defaults to the file's name. `max_batch_size` None: as in a repository, 4 with the dynamic batcher if the
    first dimensions in the file vary, else 0; above 0: the dynamic batcher with batches of up to that many rows.
    `instances` 0: the default of onnxruntime models.
    """
    place, path = calling_line(), Path(file).resolve()
    if not path.is_file():
        raise Problems([Problem(f"there is no file '{file}'", place, "B4")])
    try:
        config: dict[str, Any] = {"name": check_name(name or path.stem), "backend": "onnxruntime"}
    except Invalid as error:
        raise Problems([Problem(str(error), place, "B9")]) from None
    if max_batch_size is not None:
        config["max_batch_size"] = max_batch_size
    if max_batch_size:
        config["dynamic_batching"] = {"max_queue_delay_microseconds": max_queue_delay_us} if max_queue_delay_us else {}
    if instances:
        config["instance_group"] = [{"count": instances}]
    private = PrivateFolder()
    home = private.path / config["name"]
    (home / "1").mkdir(parents=True)
    (home / CONFIG_FILE).write_text(config_text(config, home.name), encoding="utf-8")
    (home / "1" / "model.onnx").symlink_to(path)
    for beside in path.parent.glob(f"{path.name}?*"):  # external weights next to the file: net.onnx.data
        (home / "1" / beside.name).symlink_to(beside)
    return FolderModel(home, place, private)


def model_folder(path: str | Path) -> FolderModel:
    """The model in a folder laid out as in a repository: config.pbtxt, and 1/model.py, 1/model.onnx or another file.

    Its name is the folder's. Blocks while it is read. Raises Problems.
    """
    return FolderModel(Path(path).resolve(), calling_line())
