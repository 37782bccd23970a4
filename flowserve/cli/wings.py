"""The wings of a server, as the command line assembles them.

Decides which wings `flowserve run` has; each says which options it adds, which options do not go together with them,
and what it brings to an engine (runtime/engine/wings.py). Imports of a wing wait until the options ask for it. Callers:
`options`, `run`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

from flowserve.cli.elsewhere.options import add_cluster_options, cluster_contradiction

if TYPE_CHECKING:
    from flowserve.runtime.engine.wings import Wing


class CommandWing(NamedTuple):
    """`title`: of its options. `contradiction`: the error of options that do not go together, "" if there is none.
    `open` puts what it opens on the stack; it returns None if no option asks for it. Raises FlowserveError. Blocks.
    """

    title: str
    add_options: Callable[[argparse._ActionsContainer], None]
    contradiction: Callable[[argparse.Namespace], str]
    open: Callable[[argparse.Namespace, ExitStack], Wing | None]


def _open_cluster(arguments: argparse.Namespace, stack: ExitStack) -> Wing | None:
    if arguments.cluster is None and arguments.placement is None:
        return None
    from flowserve.cli.elsewhere.open_cluster import open_cluster

    return stack.enter_context(open_cluster(arguments))


WINGS: Final = (CommandWing("models on other machines", add_cluster_options, cluster_contradiction, _open_cluster),)


def contradiction_of_wings(arguments: argparse.Namespace) -> str:
    """The first error of options that do not go together, "" if there is none."""
    return next(filter(None, (wing.contradiction(arguments) for wing in WINGS)), "")


@contextmanager
def open_wings(arguments: argparse.Namespace) -> Iterator[tuple[Wing, ...]]:
    """The wings that the options ask for. Raises FlowserveError. Blocks."""
    with ExitStack() as stack:
        found = (wing.open(arguments, stack) for wing in WINGS)
        yield tuple(wing for wing in found if wing is not None)
