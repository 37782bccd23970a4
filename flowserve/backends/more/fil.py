"""Backend `fil`: forests of decision trees, with the files and parameters of Triton's backend of that name.

Decides which file belongs to which kind of model, that XGBoost and LightGBM compute their own files if they are
installed, and treelite's reference interpreter otherwise, and how scores become the outputs that the parameters
`is_classifier`, `predict_proba` and `threshold` request. Models of scikit-learn are served as treelite's checkpoints,
which are data: a pickle would be code.

The only module that imports these libraries. It does not know batches or requests. Callers: the registry.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from flowserve.backends.library.backend import LibraryBackend
from flowserve.backends.library.interface import ModelSource, waiting_without_spinning
from flowserve.backends.library.run import Execute, Feed
from flowserve.backends.library.signature import Port, Signature
from flowserve.config.types import ModelConfig
from flowserve.errors import Problem, Problems
from flowserve.values import Array, DType

INPUT: Final = "input__0"
OUTPUT: Final = "output__0"
MODEL_TYPE: Final = "model_type"
# The file of each model_type, as on Triton.
FILES: Final[Mapping[str, str]] = {
    "xgboost_json": "xgboost.json",
    "xgboost_ubj": "xgboost.ubj",
    "xgboost": "xgboost.model",
    "lightgbm": "model.txt",
    "treelite_checkpoint": "checkpoint.tl",
}
_GPU_HINT: Final = "it is a hint about speed on a GPU"


@dataclass(frozen=True, slots=True)
class Forest:
    """`predict` takes FP32 rows of `features` numbers, NaN for a missing one, and returns scores: one per row, or one
    for each of `classes` classes if these are more than 1.
    """

    features: int
    classes: int
    predict: Callable[[Array], Array]


@dataclass(frozen=True, slots=True)
class Answer:
    """The kind of output: scores, the probability of each class, or the number of the class."""

    is_classifier: bool
    is_probability: bool
    threshold: float

    def width(self, classes: int) -> int:
        """Numbers per row."""
        if not self.is_classifier:
            return classes
        return max(classes, 2) if self.is_probability else 1

    def of(self, scores: Array) -> Array:
        """The output for scores, FP32 of shape [rows, width]."""
        scores = scores.astype(np.float32, copy=False).reshape(len(scores), -1)
        if not self.is_classifier:
            return scores
        if self.is_probability:
            return np.concatenate([1 - scores, scores], axis=1) if scores.shape[1] == 1 else scores
        # Of two classes, some libraries return the probability of the second only.
        chosen = scores[:, -1:] > self.threshold if scores.shape[1] <= 2 else scores.argmax(axis=1)[:, None]
        return chosen.astype(np.float32)


class Trees:
    """The library behind the backend: XGBoost, LightGBM and treelite."""

    name = "fil"
    title = "the tree library"
    requirement = "flowserve[fil]"
    default_filename = FILES["xgboost_json"]
    default_execution = "auto"
    strings_are_text = True
    instances = 1
    ignored: Mapping[str, str] = MappingProxyType(
        dict.fromkeys(
            ("storage_type", "algo", "blocks_per_sm", "threads_per_tree", "transfer_threshold", "chunk_size", "layout"),
            _GPU_HINT,
        )
        | {
            "use_experimental_optimizations": "the libraries' own code computes",
            "xgboost_allow_unknown_field": "unknown fields are allowed",
        }
    )

    def filenames(self, config: ModelConfig) -> Sequence[str]:
        kind = config.parameters.get(MODEL_TYPE, "")
        if kind and kind not in FILES:
            text = f"parameter '{MODEL_TYPE}' of model '{config.name}' is '{kind}'"
            hint = f"it is one of {', '.join(FILES)}"
            raise Problems([Problem(text, config.source.place(f"parameters[{MODEL_TYPE}]"), hint=hint)])
        return [FILES[kind]] if kind else [*FILES.values()]

    def modules(self, path: Path) -> Sequence[str]:
        if path.suffix == ".tl":
            return ["treelite"]
        return ["lightgbm" if path.suffix == ".txt" else "xgboost", "treelite"]

    def shares(self, source: ModelSource) -> int:
        return 1

    def signature(self, source: ModelSource) -> Signature:
        return _signature(source, _forest(source))

    def open(self, source: ModelSource) -> OpenForest:
        return OpenForest(source)

    def explain(self, error: Exception) -> str:
        lines = [line for line in str(error).splitlines() if line and not line.startswith(("Stack trace", "  ["))]
        return f"{type(error).__name__}: {' '.join(' '.join(lines).split())[:500]}"


class OpenForest:
    """One file, ready to run; the libraries predict on several threads at once."""

    def __init__(self, source: ModelSource) -> None:
        forest = _forest(source)
        self.signature = _signature(source, forest)
        self._predict = forest.predict
        self._answer = _answer(source)

    def session(self) -> Execute:
        return self._run

    def _run(self, names: list[str], feed: Feed) -> Sequence[Any]:
        return [self._answer.of(self._predict(feed[INPUT]))] * len(names)


def make_backend() -> LibraryBackend:
    return LibraryBackend(Trees())


def _answer(source: ModelSource) -> Answer:
    # `output_class` is the older name.
    is_classifier = source.flag("is_classifier", source.flag("output_class", False))
    is_probability = source.flag("predict_proba", False)
    return Answer(is_classifier or is_probability, is_probability, source.number("threshold", 0.5))


def _signature(source: ModelSource, forest: Forest) -> Signature:
    width = _answer(source).width(forest.classes)
    return Signature((Port(INPUT, DType.FP32, (-1, forest.features)),), (Port(OUTPUT, DType.FP32, (-1, width)),))


def _forest(source: ModelSource) -> Forest:
    """Raises the library's error for a file that it cannot read."""
    if source.path.suffix == ".tl":
        return _of_treelite(source, _treelite().Model.deserialize(str(source.path)))
    if source.path.suffix == ".txt":
        return _of_lightgbm(source)
    return _of_xgboost(source)


def _of_xgboost(source: ModelSource) -> Forest:
    content = source.path.read_bytes()
    if content[:1] != b"{":
        raise ValueError(
            "it is neither JSON nor UBJSON; newer versions cannot read the binary format of XGBoost before 2: save it "
            "again as xgboost.json with the version that wrote it"
        )
    try:
        with waiting_without_spinning():
            import xgboost
    except ImportError:
        loader = _treelite().frontend
        is_json = content[1:2] in (b'"', b" ", b"\n", b"\r", b"\t")
        load = loader.load_xgboost_model if is_json else _load_ubjson
        return _of_treelite(source, load(str(source.path)))
    booster = xgboost.Booster()
    booster.load_model(bytearray(content))
    booster.set_param({"nthread": source.threads})
    learner = json.loads(booster.save_config())["learner"]
    classes = int(learner["learner_model_param"]["num_class"])
    targets = int(learner["learner_model_param"].get("num_target", 1))

    def scores(rows: Array) -> Array:
        return np.asarray(booster.inplace_predict(rows, validate_features=False))

    def probabilities(rows: Array) -> Array:
        """Probabilities computed from margins: the objective multi:softmax itself returns classes."""
        margins = np.asarray(booster.inplace_predict(rows, validate_features=False, predict_type="margin"))
        raised = np.exp(margins - margins.max(axis=1, keepdims=True))
        return np.asarray(raised / raised.sum(axis=1, keepdims=True))

    return Forest(booster.num_features(), max(classes, targets), probabilities if classes > 1 else scores)


def _load_ubjson(path: str) -> Any:
    return _treelite().frontend.load_xgboost_model(path, format_choice="ubjson")


def _of_lightgbm(source: ModelSource) -> Forest:
    try:
        with waiting_without_spinning():
            import lightgbm
    except ImportError:
        return _of_treelite(source, _treelite().frontend.load_lightgbm_model(str(source.path)))
    # Given as text: LightGBM cannot open every path, and reports a missing file for a wrong one.
    booster = lightgbm.Booster(model_str=source.path.read_text())
    threads = source.threads

    def predict(rows: Array) -> Array:
        return np.asarray(booster.predict(rows, num_threads=threads))

    return Forest(booster.num_feature(), booster.num_model_per_iteration(), predict)


def _of_treelite(source: ModelSource, model: Any) -> Forest:
    treelite = _treelite()
    numbers = [int(count) for count in np.atleast_1d(model.get_header_accessor().get_field("num_class"))]
    if len(numbers) > 1 and max(numbers) > 1:
        raise ValueError(f"it has {len(numbers)} targets of several classes each, which one output cannot have")
    # Inputs are compared in the data type of the trees' thresholds.
    kind = np.float64 if model.input_type == "float64" else np.float32
    threads = source.threads

    def predict(rows: Array) -> Array:
        scores = np.asarray(treelite.gtil.predict(model, rows.astype(kind, copy=False), nthread=threads))
        return scores.reshape(len(rows), -1)

    return Forest(model.num_feature, max(len(numbers), *numbers), predict)


def _treelite() -> Any:
    with waiting_without_spinning():
        import treelite

    return treelite
