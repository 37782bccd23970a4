"""What the indices of an output mean: the label files of a model's outputs.

Decided here: that a label file is UTF-8 text, one label a line, the first for index 0; what is said of one that is not;
and that an ensemble's output without a label file of its own has the labels of the output it comes from. That a file
lies inside the model's folder is a rule of config/. Who shows labels to whom is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from flowserve.config.types import ModelConfig
from flowserve.errors import Problem, Problems
from flowserve.graph.types import GRAPH, Graph

Labels = Mapping[str, tuple[str, ...]]


def read_labels(folder: Path, config: ModelConfig) -> Labels:
    """The labels of each output that names a file. Blocks. Raises Problems where one cannot be read."""
    labels: dict[str, tuple[str, ...]] = {}
    problems: list[Problem] = []
    for index, spec in enumerate(config.outputs):
        if not spec.labels:
            continue
        try:
            text = (folder / spec.labels).read_text("utf-8")
            # Not splitlines, which ends lines at characters that a label may have, and moves all that follow.
            labels[spec.name] = tuple(text.removesuffix("\n").split("\n")) if text else ()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            place = config.source.place(f"output[{index}].label_filename")
            problems.append(Problem(f"label file '{spec.labels}' of output '{spec.name}' cannot be read: {why}", place))
    if problems:
        raise Problems(problems)
    return labels


def output_labels(graph: Graph, labels_of: Callable[[str], Labels]) -> Labels:
    """The labels of a graph's outputs. `labels_of` tells what `read_labels` said of a model or ensemble."""
    labels = dict(labels_of(graph.name))
    for edge in graph.edges:
        if edge.consumer == GRAPH and edge.producer != GRAPH:
            node = graph.nodes[edge.producer]
            found = labels_of(node.model.name).get(node.outputs[edge.output].name)
            if found:
                labels.setdefault(graph.outputs[edge.input].name, found)
    return labels
