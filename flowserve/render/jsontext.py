"""A compiled graph as JSON, for programs: pages, editors, tests. docs/pictures.md describes each field.

Decides the format of the document, which is stable: fields may be added, but existing ones keep their name and meaning
while `schema` is the same. Callers: `formats`, the live page.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from flowserve.config.types import ModelConfig
from flowserve.graph.transfers import Transfer
from flowserve.graph.types import GRAPH, Edge, Graph, Node
from flowserve.render import labels
from flowserve.render.scopes import scopes_of
from flowserve.values import TensorSpec

SCHEMA: Final = "flowserve.graph/1"


def render_json(graph: Graph, configs: labels.Configs) -> str:
    return json.dumps(graph_document(graph, configs), indent=2, ensure_ascii=False) + "\n"


def graph_document(graph: Graph, configs: labels.Configs) -> dict[str, Any]:
    """The document as plain dicts and lists. Equal graphs and configs give equal documents, keys in order."""
    return {
        "schema": SCHEMA,
        "name": graph.name,
        "version": graph.version,
        "is_ensemble": graph.is_ensemble,
        "max_batch_size": graph.max_batch_size,
        "max_inflight_requests": configs.get(graph.name, labels.UNKNOWN).max_inflight_requests,
        "inputs": _tensors(graph.inputs),
        "outputs": _tensors(graph.outputs),
        "ensembles": [
            {
                "path": scope.path,
                "name": scope.ensemble,
                "max_inflight_requests": configs.get(scope.ensemble, labels.UNKNOWN).max_inflight_requests,
            }
            for scope in scopes_of(graph).walk()
            if scope.space is None
        ],
        "spaces": [
            {"index": space.index, "parent": space.parent, "name": space.name, "title": space.title}
            for space in graph.spaces
        ],
        "nodes": [_node(node, configs.get(node.model.name, labels.UNKNOWN)) for node in graph.nodes],
        "edges": [
            _edge(graph, edge, transfer)
            for edge, transfer in zip(graph.edges, labels.transfers_of(graph, configs), strict=True)
        ],
    }


def _tensors(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
    return [
        {
            "name": spec.name,
            "dtype": str(spec.dtype),
            "dims": list(spec.dims),
            "optional": spec.optional,
            "ragged": spec.ragged,
        }
        for spec in specs
    ]


def _node(node: Node, config: ModelConfig) -> dict[str, Any]:
    queue = labels.queueing(config)
    return {
        "index": node.index,
        "name": node.name,
        "model": node.model.name,
        "version": node.model.version,
        "ensemble": node.name.rpartition("/")[0],
        "backend": config.backend,
        "batching": {
            "batcher": labels.batcher(config),
            "max_batch_size": node.max_batch_size,
            "max_queue_delay_us": queue.max_queue_delay_us,
        },
        "instances": [
            {"count": group.count, "device": labels.device(group), "gpus": list(group.gpus)}
            for group in config.active_groups
        ],
        "is_stateful": labels.batcher(config) == "sequence",
        "is_decoupled": config.decoupled,
        "limits": {
            "max_queue_size": queue.default_queue_policy.max_queue_size,
            "resources": labels.resources(config),
        },
        "inputs": _tensors(node.inputs),
        "outputs": _tensors(node.outputs),
        "space": node.space,
        "place": str(node.place) if node.place else "",
        **({"machines": config.placed} if config.placed else {}),
        **({"segment": config.segment} if config.segment else {}),
    }


def _edge(graph: Graph, edge: Edge, transfer: Transfer) -> dict[str, Any]:
    spec = graph.written(edge)
    reader = graph.outputs if edge.consumer == GRAPH else graph.nodes[edge.consumer].inputs
    return {
        "tensor": edge.tensor,
        "dtype": str(spec.dtype),
        "dims": list(spec.dims),
        "from": {"node": None if edge.producer == GRAPH else edge.producer, "tensor": spec.name},
        "to": {"node": None if edge.consumer == GRAPH else edge.consumer, "tensor": reader[edge.input].name},
        "transfer": {
            "kind": transfer.kind,
            "from": [str(place) for place in transfer.source],
            "to": [str(place) for place in transfer.to],
            "row_bytes": transfer.row_bytes,
        },
    }
