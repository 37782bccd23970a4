"""Rule P7 about placement files: a segment is convex in every graph that uses it.

A segment runs as one hop, so no path of a graph may leave it and come back: the steps outside would wait for the
segment, and the segment for them. Decides how such a path is found, and the text about it. The other rules about
placement files need no graph (placement.py). Callers: cli/, and the wing, which warns: a server runs such steps one by
one.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from flowserve.elsewhere.placement import ModelPlace, PlacementFile
from flowserve.errors import Problem
from flowserve.graph.plan import openers
from flowserve.graph.types import GRAPH, Graph


def broken_segments(placement: PlacementFile, graphs: Iterable[Graph]) -> Iterator[Problem]:
    """The violations of P7, one for each segment and graph, where the file names the model that a path comes back
    to.
    """
    for graph in graphs:
        for segment, path in paths_outside(graph, placement.places):
            between = ", ".join(f"'{name}'" for name in dict.fromkeys(graph.nodes[n].model.name for n in path[1:-1]))
            back = placement.places[graph.nodes[path[-1]].model.name]
            hint = f"name {between} in it too, or divide it into two segments"
            yield Problem(way_back(graph, segment, path), placement.source.place(back.path), "P7", hint)


def paths_outside(graph: Graph, places: Mapping[str, ModelPlace]) -> Iterator[tuple[str, list[int]]]:
    """The segments of `places`, by model, that a path of the graph leaves and comes back to, each with the path."""
    for segment in dict.fromkeys(place.segment for place in places.values() if place.segment):
        path = path_outside(graph, {name for name, place in places.items() if place.segment == segment})
        if path:
            yield segment, path


def way_back(graph: Graph, segment: str, path: Sequence[int]) -> str:
    """A sentence about one of `paths_outside`."""
    names = " -> ".join(graph.nodes[n].name for n in path)
    return f"a path of '{graph.name}' leaves segment '{segment}' and comes back: {names}"


def path_outside(graph: Graph, models: Collection[str]) -> list[int]:
    """The nodes of a shortest path that begins and ends with nodes of these models, with others in between; [] if there
    is none.
    """
    following: dict[int, dict[int, None]] = defaultdict(dict)
    for edge in graph.edges:
        if GRAPH not in (edge.producer, edge.consumer):
            following[edge.producer][edge.consumer] = None
    for node in graph.nodes:
        for opener in sorted(openers(graph, node.space) - {GRAPH}):
            following[opener][node.index] = None
    inside = {node.index for node in graph.nodes if node.model.name in models}
    before: dict[int, int] = {}  # the predecessor of each outside node that a path from the inside reaches
    reached = deque((n, after) for n in sorted(inside) for after in following[n])
    while reached:
        n, after = reached.popleft()
        if after in inside:
            if n in inside:
                continue
            path = [after, n]
            while path[-1] not in inside:
                path.append(before[path[-1]])
            return path[::-1]
        if after not in before:
            before[after] = n
            reached.extend((after, further) for further in following[after])
    return []
