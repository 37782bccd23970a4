"""Options about models on other machines: the cluster, the placement file, the connections, and the machines of a
proposal.

Decides the values of each; `open_cluster` decides which belong together. Callers: `wings`, `main`.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flowserve.cli.option_values import add_option, positive, whole_number

RAY: Final = "ray"
_LOCAL: Final = re.compile(r"local:([1-9][0-9]?)")
_TIMEOUT_S: Final = 60
CPU, GPU = "cpu", "gpu"  # kinds of machines: with cores only, and with a GPU each
_MACHINES: Final = re.compile(rf"({CPU}|{GPU})\*([1-9][0-9]{{0,3}})")
_LINK_US: Final = 400.0
_LINK_MB_PER_S: Final = 1000.0


@dataclass(frozen=True, slots=True)
class ClusterChoice:
    """`count`: the machines of the local engine; 0 for Ray's cluster."""

    count: int = 0


def add_cluster_options(group: argparse._ActionsContainer) -> None:
    """Those of `flowserve run`."""
    text = "where models that --placement names run: ray, or local:N for N processes of this machine, to try it out"
    add_option(group, "--cluster ENGINE", text, _engine)
    add_placement(group)
    text = "how long an instance may wait for a machine that has what it needs; default %(default)s"
    add_option(group, "--cluster-timeout SECONDS", text, whole_number(1), _TIMEOUT_S)
    text = "files on this and on every other machine, for the connections between them"
    add_option(group, "--cluster-tls CERT,KEY,CA", text, _tls)
    text = "use a cluster of Ray without tokens (RAY_AUTH_MODE=token), where every program that reaches it can run code"
    group.add_argument("--cluster-insecure", action="store_true", help=text)


def cluster_contradiction(arguments: argparse.Namespace) -> str:
    """The error of options that do not go together with those of the cluster, "" if there is none."""
    if arguments.cluster is None or arguments.workers == 1:
        return ""
    return (
        "--cluster and --workers do not go together: each of the servers would start all instances of its own; "
        "start one server, or several behind a load balancer"
    )


def add_placement(group: argparse._ActionsContainer) -> None:
    """The option that `flowserve check` has too."""
    add_option(group, "--placement FILE", "which models run on other machines, and what they need there", Path)


def add_place_options(group: argparse._ActionsContainer) -> None:
    """Those of `flowserve place` that are about machines."""
    text = "the other machines, by kind: cpu, or gpu for those with a GPU each"
    group.add_argument("--machines", metavar="KIND*COUNT[,...]", type=machines, required=True, help=text)
    text = "the cores of this machine and of each other one; default: those that this process may use"
    add_option(group, "--cores N", text, whole_number(1, 4096))
    text = "what a batch takes there and back besides its bytes; default %(default)g"
    add_option(group, "--link-each-us US", text, positive, _LINK_US)
    text = "how many bytes cross; default %(default)g"
    add_option(group, "--link-mb-per-s MB", text, positive, _LINK_MB_PER_S)


def machines(text: str) -> dict[str, int]:
    """ "gpu*2,cpu*4": how many machines there are of each kind."""
    found: dict[str, int] = {}
    for number, part in enumerate(text.split(","), 1):
        match = _MACHINES.fullmatch(part)
        where = f"part {number} of {text!r}, {part!r}"
        if match is None:
            raise argparse.ArgumentTypeError(f"expected {CPU}*COUNT or {GPU}*COUNT, such as {GPU}*2,{CPU}*4: {where}")
        if match[1] in found:
            raise argparse.ArgumentTypeError(f"'{match[1]}' is there twice: {where}")
        found[match[1]] = int(match[2])
    return found


def _engine(text: str) -> ClusterChoice:
    if text == RAY:
        return ClusterChoice()
    found = _LOCAL.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected ray or local:N, such as local:3, got {text!r}")
    return ClusterChoice(int(found[1]))


def _tls(text: str) -> tuple[str, str, str]:
    parts = text.split(",")
    if len(parts) != 3 or not all(parts):
        raise argparse.ArgumentTypeError(f"expected three files, CERT,KEY,CA, got {text!r}")
    certificate, key, authority = parts
    return certificate, key, authority
