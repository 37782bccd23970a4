"""Small models of the real libraries: `python -m tests.support.library_models LIBRARY FOLDER` writes a repository.

Decides what each model computes, from fixed seeds, and stores the library's own output for `X` in `expected.npz`, one
array for each model. It is a separate program, because the libraries are large and warn on import.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

X = np.random.default_rng(5).random((4, 6)).astype(np.float32)
X[1, 2] = np.nan  # a missing value for trees


def folder_of(repository: Path, name: str, config: str = "") -> Path:
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(config)
    return version


def parameters(**values: str) -> str:
    return "".join(
        f' parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in values.items()
    )


def write_fil(repository: Path) -> dict[str, Any]:
    """Forests of all kinds; those of two classes return probabilities, classes, or classes above a threshold."""
    import lightgbm
    import treelite
    import xgboost
    from sklearn.ensemble import GradientBoostingRegressor, RandomForestClassifier

    rng = np.random.default_rng(0)
    rows = rng.random((300, 6)).astype(np.float32)
    two, three = (rows[:, 0] + rows[:, 1] > 1).astype(int), (rows[:, 2] * 3).astype(int)
    expected: dict[str, Any] = {}

    model = xgboost.XGBClassifier(n_estimators=10, max_depth=3).fit(rows, two)
    p = model.predict_proba(X)
    model.save_model(folder_of(repository, "xgb") / "xgboost.json")  # its backend is derived from the file
    expected["xgb"] = p[:, 1:]
    config = 'backend: "fil" max_batch_size: 8' + parameters(
        model_type="xgboost_ubj", predict_proba="true", algo="ALGO_AUTO"
    )
    model.save_model(folder_of(repository, "xgb_probabilities", config) / "xgboost.ubj")
    expected["xgb_probabilities"] = p
    config = 'backend: "fil"' + parameters(output_class="true", threshold="0.9")
    model.save_model(folder_of(repository, "xgb_sure", config) / "xgboost.json")
    expected["xgb_sure"] = p[:, 1:] > 0.9

    model = xgboost.XGBClassifier(n_estimators=5, objective="multi:softmax", num_class=3).fit(rows, three)
    model.save_model(folder_of(repository, "xgb_three", config.replace('"0.9"', '"0.5"')) / "xgboost.json")
    expected["xgb_three"] = model.predict(X)[:, None]

    model = lightgbm.LGBMClassifier(n_estimators=5, verbosity=-1).fit(rows, three)
    config = 'backend: "fil"' + parameters(predict_proba="true")
    model.booster_.save_model(folder_of(repository, "lgb_three", config) / "model.txt")
    expected["lgb_three"] = model.booster_.predict(X)

    forest = RandomForestClassifier(5, random_state=0).fit(rows, two)
    treelite.sklearn.import_model(forest).serialize(folder_of(repository, "forest", config) / "checkpoint.tl")
    expected["forest"] = forest.predict_proba(X)
    boosted = GradientBoostingRegressor(n_estimators=5, random_state=0).fit(rows, rows[:, 0])
    version = folder_of(repository, "regressor", 'backend: "fil" max_batch_size: 0')
    treelite.sklearn.import_model(boosted).serialize(version / "checkpoint.tl")
    expected["regressor"] = boosted.predict(np.nan_to_num(X, nan=0.5))[:, None]
    return expected


def write_openvino(repository: Path) -> dict[str, Any]:
    """The same graph as ONNX and as OpenVINO's own file."""
    import onnx
    import openvino
    from onnx import TensorProto, helper

    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 6])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 6])
    graph = helper.make_graph([helper.make_node("Mul", ["x", "x"], ["y"])], "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, folder_of(repository, "ov_onnx", 'backend: "openvino"') / "model.onnx")
    hints = parameters(NUM_STREAMS="1", PERFORMANCE_HINT="LATENCY", ENABLE_BATCH_PADDING="YES")
    version = folder_of(
        repository, "ov_xml", 'backend: "openvino" max_batch_size: 4 instance_group { count: 2 }' + hints
    )
    core = openvino.Core()
    openvino.save_model(core.read_model(repository / "ov_onnx" / "1" / "model.onnx"), version / "model.xml")
    return {"ov_onnx": X * X, "ov_xml": X * X}


def write_tensorflow(repository: Path) -> dict[str, Any]:
    """A SavedModel with text, a frozen graph, and the model whose configuration Triton's guide shows."""
    import tensorflow as tf

    def saved(name: str, function: Any, config: str, **inputs: Any) -> None:
        module = tf.Module()
        module.run = tf.function(function, input_signature=list(inputs.values()))
        version = folder_of(repository, name, config)
        tf.saved_model.save(module, str(version / "model.savedmodel"), signatures={"serving_default": module.run})

    def words(x: Any, text: Any) -> Any:
        return {"y": x * 2.0, "loud": tf.strings.upper(text)}

    def steps(INPUT: Any, START: Any, END: Any, CORRID: Any) -> Any:
        return {"OUTPUT": INPUT[:, 0, :10] + 100 * START + 1000 * END + tf.cast(CORRID, tf.float32)}

    one = tf.TensorSpec([None, 1], tf.float32, name="START")
    saved(
        "words",
        words,
        'platform: "tensorflow_savedmodel" instance_group [ { count: 2 kind: KIND_CPU } ]'
        + parameters(TF_NUM_INTRA_THREADS="1", MAX_SESSION_SHARE_COUNT="2"),
        x=tf.TensorSpec([None, 6], tf.float32, name="x"),
        text=tf.TensorSpec([None, 1], tf.string, name="text"),
    )
    saved(
        "oldest_stateful_model",
        steps,
        (Path(__file__).parents[1] / "golden/seeds/oldest_stateful_model.pbtxt").read_text(),
        INPUT=tf.TensorSpec([None, 100, 100], tf.float32, name="INPUT"),
        START=one,
        END=tf.TensorSpec([None, 1], tf.float32, name="END"),
        CORRID=tf.TensorSpec([None, 1], tf.uint64, name="CORRID"),
    )
    graph = tf.Graph()
    with graph.as_default():
        given = tf.compat.v1.placeholder(tf.float32, [None, 6], name="given")
        tf.identity(given + 1.0, name="made")
    (folder_of(repository, "frozen") / "model.graphdef").write_bytes(graph.as_graph_def().SerializeToString())
    return {"words": X * 2, "frozen": X + 1}


def write_pytorch(repository: Path) -> dict[str, Any]:
    """The same function as TorchScript and as an exported program; TorchScript that returns a dictionary."""
    import torch

    class Both(torch.nn.Module):  # type: ignore[misc]  # torch is not installed for the type checks
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x + y, x * y

    class Named(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"double": x * 2, "half": x / 2}

    def tensor(side: str, name: str) -> str:
        return f' {side} {{ name: "{name}" data_type: TYPE_FP32 dims: [ 6 ] }}'

    config = 'backend: "pytorch" max_batch_size: 8' + tensor("input", "INPUT__0") + tensor("input", "y")
    config += tensor("output", "PRODUCT__1") + parameters(INFERENCE_MODE="true", ENABLE_WEIGHT_SHARING="true")
    torch.jit.script(Both()).save(str(folder_of(repository, "script", config) / "model.pt"))
    config = 'platform: "pytorch_libtorch" max_batch_size: 8' + tensor("input", "x") + tensor("output", "half")
    torch.jit.script(Named()).save(str(folder_of(repository, "named", config) / "model.pt"))
    rows = torch.export.Dim("rows")
    sample = (torch.ones(2, 6), torch.ones(2, 6))
    program = torch.export.export(Both(), sample, dynamic_shapes={"x": {0: rows}, "y": {0: rows}})
    torch.export.save(program, folder_of(repository, "exported") / "model.pt2")
    return {"script": X * X, "named": X / 2, "exported": X + X}


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    np.savez(folder.parent / "expected.npz", **globals()[f"write_{sys.argv[1]}"](folder))
