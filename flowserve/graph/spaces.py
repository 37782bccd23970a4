"""The spaces of one ensemble: for which rows each step runs, where each tensor exists, and the rules about both.

A space is a set of rows. The request's own rows are space 0. `when` opens a space below another with the rows that pass
a test, `each` one with a row for each item of a tensor; the spaces of an ensemble are a tree. A step runs in the space
that its `each` and `when` name, or else in the deepest space of the tensors it reads. A tensor is *closed* if `fill`
names it: it can be read outside of its space, and a step that says nothing else reads it there.

Decides these two mappings from the wiring alone, and rules G30 to G36. Does not know nested ensembles' own spaces
(`compile` puts them below the space of their step), nor how rows are selected and joined (`memory/rows`). Callers:
`rules`, `compile`.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf, isfinite, nextafter, prod

import networkx as nx
import numpy as np

from flowserve.config.types import EachItem, Fill, ModelConfig, RowTest
from flowserve.errors import Place, Problem
from flowserve.graph.types import GRAPH
from flowserve.graph.wiring import End, Wiring, port_index
from flowserve.values import DType, TensorSpec

_COUNTS = frozenset(
    {DType.INT32, DType.INT64, DType.UINT8, DType.UINT16, DType.UINT32, DType.UINT64, DType.INT8, DType.INT16}
)
_EXACT_MAX = 2**53 - 1  # the next integer may be one that a 64-bit floating-point number has rounded
_FLOATS = frozenset({DType.FP16, DType.FP32, DType.FP64, DType.BF16})


@dataclass(frozen=True, slots=True)
class LocalSpace:
    """A space of one ensemble. Exactly one of `test` and `each` is given; space 0 has neither. `path`: of the first
    step that names it.
    """

    index: int
    parent: int
    test: RowTest | None = None
    each: EachItem | None = None
    path: str = ""

    def __str__(self) -> str:
        return f"when {self.test}" if self.test is not None else f"each {self.each}"


@dataclass(slots=True)
class Arrangement:
    """`of_step[i]`: the space of step i. `homes[T]`: the space of tensor T; of one that several steps write, the space
    in which it is merged. `fills[T]`: how T is filled. `is_sound`: every step has a space.
    """

    spaces: list[LocalSpace] = field(default_factory=lambda: [LocalSpace(0, 0)])
    of_step: dict[int, int] = field(default_factory=dict)
    homes: dict[str, int] = field(default_factory=dict)
    fills: dict[str, Fill] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    is_sound: bool = True

    def path(self, space: int) -> list[int]:
        """The spaces from the outermost, 0, to this one."""
        found = [space]
        while found[-1]:
            found.append(self.spaces[found[-1]].parent)
        return found[::-1]

    def has_rows(self, w: Wiring, space: int) -> bool:
        """Whether the tensors of a space have a batch dimension."""
        return w.config.max_batch_size > 0 or any(self.spaces[one].each is not None for one in self.path(space))

    def common(self, a: int, b: int) -> int:
        """The deepest space around both."""
        return [one for one, other in zip(self.path(a), self.path(b), strict=False) if one == other][-1]

    def tests_beside(self, space: LocalSpace) -> list[RowTest]:
        """The other tests of the same tensor among the same rows."""
        return [
            one.test
            for one in self.spaces
            if one.test is not None
            and space.test is not None
            and one.parent == space.parent
            and one.index != space.index
            and one.test.tensor == space.test.tensor
        ]


def arrange(w: Wiring) -> Arrangement:
    """The spaces of a wiring's steps and tensors. `problems` are the violations of rules G30, G31, G35 and G36; steps
    on a cycle and tensors without a writer are left out, because other rules report them.
    """
    made = Arrangement(fills={fill.tensor: fill for fill in w.fills})
    if not w.has_spaces:
        made.of_step = dict.fromkeys(range(len(w.steps)), 0)
        made.homes = dict.fromkeys(w.tensors(), 0)
        return made
    joined = w.step_graph()
    if not nx.is_directed_acyclic_graph(joined):
        return made
    made.homes = {spec.name: 0 for spec in w.config.inputs}
    for index in nx.lexicographical_topological_sort(joined, key=lambda index: index):
        made.of_step[index] = _place_step(w, made, index)
        for tensor in w.steps[index].written.output_map.values():
            made.homes[tensor] = _home(w, made, tensor, index)
        for fill in w.fills:
            if fill.present and fill.tensor in w.steps[index].written.output_map.values():
                made.homes[fill.present] = made.homes[fill.tensor]
    made.is_sound = not made.problems  # else the spaces of later steps, and problems with them, are meaningless
    if made.is_sound:
        made.problems += _wrong_tests(w, made)
        wrong = dict(_wrong_writers(w, made))
        made.problems += wrong.values()
        made.problems += _wrong_fills(w, made)
        made.problems += _read_outside(w, made, wrong)
    return made


def closed(made: Arrangement, tensor: str) -> bool:
    """Whether a tensor is read outside of its space unless a step says otherwise."""
    return tensor in made.fills or any(fill.present == tensor for fill in made.fills.values())


def _place_step(w: Wiring, made: Arrangement, index: int) -> int:
    """The space of a step; spaces that it is the first to name are added."""
    written = w.steps[index].written
    space = 0
    for tensor in dict.fromkeys([*sorted(written.input_map.values()), *(name for name, _ in written.row_reads())]):
        home = made.homes.get(tensor, 0)
        if closed(made, tensor) and not (written.each or written.when):
            continue
        if closed(made, tensor):
            home = _outer_of(made, home)
        common = made.common(space, home)
        if common not in (space, home):
            text = (
                f"in ensemble {w.name}, step {index} (model '{written.model}') reads '{tensor}', which exists for the "
                f"rows of `{made.spaces[home]}`, and another tensor for those of `{made.spaces[space]}`: no row has "
                "both"
            )
            hint = "`fill` one of them, and it exists for every row"
            made.problems.append(Problem(text, w.place(written.path), "G36", hint))
            return 0
        space = home if common == space else space
    named = [made.spaces[one] for one in made.path(space)]
    if written.each is not None and not any(one.each is not None and _is_same(one.each, written.each) for one in named):
        again = next((name for name in written.each.tensors if _is_item(made, space, name)), None)
        if again is not None:
            text = f"step {index} (model '{written.model}') takes '{again}' apart, of which it reads one item already"
            hint = "steps that run for the same items name the same tensors and the same count in `each`"
            made.problems.append(Problem(text, w.place(f"{written.path}.each"), "G35", hint))
            return 0
        space = _child(made, space, LocalSpace(0, space, each=written.each, path=written.path))
    for test in written.when:
        if test not in [made.spaces[one].test for one in made.path(space)]:
            space = _child(made, space, LocalSpace(0, space, test=test, path=written.path))
    return space


def _outer_of(made: Arrangement, home: int) -> int:
    """The space around all conditions at the end of the path to `home`: a closed tensor of a step that names its rows
    belongs to the items, not to the rows of one condition.
    """
    while home and made.spaces[home].test is not None:
        home = made.spaces[home].parent
    return home


def _is_same(one: EachItem, other: EachItem) -> bool:
    """Whether two steps run for the same items. `at_most` is given once, by the first of them."""
    return one.tensors == other.tensors and one.count == other.count


def _child(made: Arrangement, parent: int, wanted: LocalSpace) -> int:
    for one in made.spaces[1:]:
        if one.parent != parent:
            continue
        if wanted.test is not None and one.test == wanted.test:
            return one.index
        if wanted.each is not None and one.each is not None and _is_same(one.each, wanted.each):
            return one.index
    made.spaces.append(replace(wanted, index=len(made.spaces)))
    return len(made.spaces) - 1


def _home(w: Wiring, made: Arrangement, tensor: str, index: int) -> int:
    """The space of a tensor that this step writes, perhaps together with others."""
    steps = dict.fromkeys(end.step for end in w.writers.get(tensor, ()) if end.step in made.of_step)
    space = made.of_step[index]
    if len(steps) < 2:
        return space
    for step in steps:
        space = made.common(space, made.of_step[step])
    return space


def branches(made: Arrangement, w: Wiring, tensor: str) -> list[tuple[End, int]]:
    """The writers of a tensor that several steps write, each with its space."""
    return [(end, made.of_step[end.step]) for end in w.writers[tensor] if not end.field and end.step in made.of_step]


# Rules


def _wrong_tests(w: Wiring, made: Arrangement) -> Iterator[Problem]:
    """G35: the requirements of tests, counts and items on their tensors."""
    for space in made.spaces[1:]:
        step = next(step for step in w.steps if step.written.path == space.path)
        subject = f"step {step.index} (model '{step.written.model}')"
        place = w.place(space.path)
        if space.test is not None:
            spec = declared(w, space.test.tensor)
            if spec is not None:
                inside = _is_item(made, space.parent, space.test.tensor)
                yield from _untestable(spec, spec.dims[1:] if inside else spec.dims, subject, place)
            if space.test.otherwise and not made.tests_beside(space):
                text = f"{subject}: `otherwise` of '{space.test.tensor}', which no other step tests for the same rows"
                yield Problem(text, place, "G35")
        for tensor in space.each.tensors if space.each is not None else ():
            spec = declared(w, tensor)
            if spec is not None and not spec.dims:
                yield Problem(f"{subject}: '{tensor}' has no dimension of items to take apart", place, "G35")
        if space.each is not None and space.each.count:
            spec = declared(w, space.each.count)
            if spec is not None and (spec.dtype not in _COUNTS or prod(spec.dims) != 1):
                text = f"{subject}: the count '{spec.name}' is {spec.dtype} {[*spec.dims]}"
                yield Problem(text, place, "G35", "a count is one integer for each row")


def _untestable(spec: TensorSpec, dims: Sequence[int], subject: str, place: Place | None) -> Iterator[Problem]:
    """Of a tested tensor with these dims."""
    if spec.dtype is DType.BYTES:
        text = f"{subject}: '{spec.name}' is BYTES and cannot be tested"
        yield Problem(text, place, "G35", "compare it in a model, which writes a number")
    elif prod(dims) != 1:
        text = f"{subject}: '{spec.name}' has dims {[*dims]}; a test needs one number for each row"
        yield Problem(text, place, "G35")


def _is_item(made: Arrangement, space: int, tensor: str) -> bool:
    """Whether a tensor's name means one of its items in this space."""
    return any((each := made.spaces[one].each) is not None and tensor in (*each.tensors,) for one in made.path(space))


def _wrong_writers(w: Wiring, made: Arrangement) -> Iterator[tuple[str, Problem]]:
    """G31: several steps write a tensor for rows that must differ. With each problem its tensor."""
    for tensor, writers in w.writers.items():
        found = branches(made, w, tensor) if len(writers) > 1 else []
        if len(found) < 2 or any(end.step == GRAPH for end in writers):
            continue
        parent = made.homes[tensor]
        seen: list[tuple[End, LocalSpace]] = []
        for end, index in found:
            space = made.spaces[index]
            if index != parent and (space.parent != parent or space.test is None):
                text = (
                    f"tensor '{tensor}' is written in `{space}` and elsewhere, and these are not tests of the same rows"
                )
                yield tensor, Problem(f"in ensemble {w.name}, {text}", w.place_of_writer(end), "G31")
                break
            clash = next((other for other, one in seen if _may_meet(w, space, one, parent)), None)
            if clash is not None:
                text = (
                    f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble '{w.name}' step "
                    f"{end.step}: it is already written by step {clash.step}, and both may run for the same row"
                )
                hint = "steps that write one tensor test one tensor, each for other rows; one may run for all rows"
                yield tensor, Problem(text, w.place_of_writer(end), "G31", hint)
                break
            seen.append((end, space))
        else:
            if tensor not in made.fills and not _is_complete(w, made, [one for _, one in seen], parent):
                text = f"tensor '{tensor}' is written for some rows only: no step writes it for the others"
                hint = f'`fill {{ tensor: "{tensor}" value: … }}`, or a step with `otherwise: true`'
                place = w.place_of_writer(seen[-1][0])
                yield tensor, Problem(f"in ensemble {w.name}, {text}", place, "G31", hint)


def _may_meet(w: Wiring, one: LocalSpace, other: LocalSpace, parent: int) -> bool:
    """Whether a row may be in both spaces, each of which is `parent` or a condition below it."""
    if parent in (one.index, other.index):  # a step for all rows writes those that no other step writes
        return one.index == other.index
    assert one.test is not None
    assert other.test is not None
    if one.test.tensor != other.test.tensor or one.test == other.test:
        return True
    if one.test.otherwise or other.test.otherwise:
        return False
    numbers = _samples(w, [one.test, other.test])
    return any(one.test.passes(number) and other.test.passes(number) for number in numbers)


def _is_complete(w: Wiring, made: Arrangement, written: Sequence[LocalSpace], parent: int) -> bool:
    if any(space.index == parent for space in written):
        return True
    tests = [space.test for space in written if space.test is not None]
    if any(test.otherwise for test in tests):
        return all(test in tests for test in made.tests_beside(written[0]))
    spec = declared(w, tests[0].tensor)
    if spec is None or spec.dtype in _FLOATS:  # NaN passes no test
        return False
    return all(any(test.passes(number) for test in tests) for number in _samples(w, tests))


def _samples(w: Wiring, tests: Sequence[RowTest]) -> list[float]:
    """Numbers that the tests' tensor may have: at least one in each interval that the tests distinguish, and each of
    their limits.
    """
    spec = declared(w, tests[0].tensor)
    if spec is not None and spec.dtype is DType.BOOL:
        return [0.0, 1.0]
    limits = {0.0, 1.0}
    for test in tests:
        limits.update(float(one) for one in (test.above, test.below, *test.equals) if one is not None)
    found = {-inf, inf}
    for limit in limits:
        found |= {limit, nextafter(limit, -inf), nextafter(limit, inf), limit - 1, limit + 1}
    if spec is not None and spec.dtype not in _FLOATS:
        return [number for number in found if number in (-inf, inf) or number.is_integer()]
    ordered = sorted(limits)
    return sorted(found | {(low + high) / 2 for low, high in pairwise(ordered)})


def _wrong_fills(w: Wiring, made: Arrangement) -> Iterator[Problem]:
    """G31: a `fill` of a tensor that exists for every row, or that no step writes."""
    for fill in w.fills:
        place = w.place(fill.path)
        spec = declared(w, fill.tensor)
        writers = [end for end in w.writers.get(fill.tensor, ()) if not end.field]
        if not writers or writers[0].step == GRAPH:
            yield Problem(f"in ensemble {w.name}, fill names '{fill.tensor}', which no step writes", place, "G31")
        elif not made.homes.get(fill.tensor) and len(writers) == 1:
            text = f"in ensemble {w.name}, tensor '{fill.tensor}' is written for every row, so nothing can be filled"
            yield Problem(text, place, "G31")
        if fill.present and any(not end.field for end in w.writers.get(fill.present, ())):
            text = (
                f"in ensemble {w.name}, '{fill.present}' is written by a step and cannot say what '{fill.tensor}' has"
            )
            yield Problem(text, place, "G31")
        if spec is not None and spec.dtype is not DType.BYTES and fill.string:
            text = f"in ensemble {w.name}, tensor '{fill.tensor}' is {spec.dtype}, and `string_value` fills BYTES only"
            yield Problem(text, place, "G31", "write `value`")
        if spec is not None and not _holds(spec.dtype, fill.value):
            text = f"in ensemble {w.name}, tensor '{fill.tensor}' is {spec.dtype}, which cannot be {fill.value:.17g}"
            hint = "a `value` is a 64-bit floating-point number, in which integers are exact up to 2 to the power of 53"
            is_inexact = spec.dtype not in _FLOATS and abs(fill.value) > _EXACT_MAX
            yield Problem(text, place, "G31", hint if is_inexact else "")


def _holds(dtype: DType, value: float) -> bool:
    """Whether a tensor of this type can have the value."""
    if dtype is DType.BOOL:
        return value in (0, 1)
    if dtype is DType.BYTES:
        return not value
    if dtype in _FLOATS:
        with np.errstate(over="ignore"):
            return not isfinite(value) or bool(np.isfinite(np.asarray(value).astype(dtype.numpy)))
    limits = np.iinfo(dtype.numpy)
    return value.is_integer() and limits.min <= value <= limits.max and abs(value) <= _EXACT_MAX


def _read_outside(w: Wiring, made: Arrangement, wrong: Container[str]) -> Iterator[Problem]:
    """G30: a tensor of some rows is read where all rows are needed. `wrong`: tensors with a problem already."""
    for tensor, home in made.homes.items():
        if closed(made, tensor) or tensor in wrong:
            continue
        for end in w.readers.get(tensor, ()):
            if end.step != GRAPH and end.step not in made.of_step:
                continue
            space = 0 if end.step == GRAPH else made.of_step[end.step]
            outside = made.common(space, home)
            conditions = made.path(home)[made.path(home).index(outside) + 1 :]
            tests = [made.spaces[one] for one in conditions if made.spaces[one].test is not None]
            # A request of one row takes a branch or does not; then the output is left out.
            is_left_out = end.step == GRAPH and w.config.max_batch_size <= 1 and len(tests) == len(conditions)
            if tests and not is_left_out:
                text = f"in ensemble {w.name}, tensor '{tensor}' exists for some rows only, those of `{tests[-1]}`"
                hint = "give `fill` a value, write it in every case, or run this step under the same `when`"
                yield Problem(text, w.place_of_reader(end), "G30", hint)
                break


def declared(w: Wiring, tensor: str) -> TensorSpec | None:
    """The declaration of a tensor by its first writer; None if that is unknown."""
    for end in w.writers.get(tensor, ()):
        if end.field:
            return TensorSpec(tensor, DType.BOOL, (1,))
        owner: ModelConfig | None = w.config if end.step == GRAPH else w.steps[end.step].model
        specs = () if owner is None else owner.inputs if end.step == GRAPH else owner.outputs
        if any(spec.name == end.port for spec in specs):
            return replace(specs[port_index(specs, end.port)], name=tensor)
    return None
