"""The cluster of a server, from its options.

Decides which options belong together, and which engine they name. Does not know how an engine works. Caller: `wings`.
"""

from __future__ import annotations

import argparse
import ipaddress
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from flowserve.cli.elsewhere.options import ClusterChoice
from flowserve.elsewhere.actors import ClusterOptions
from flowserve.elsewhere.cluster.agents import LocalCluster, RayCluster
from flowserve.elsewhere.cluster.link import client_context
from flowserve.elsewhere.placement import PlacementFile, read_placement
from flowserve.elsewhere.wing import other_machines
from flowserve.errors import Invalid, Place, Problem, Problems
from flowserve.runtime.engine.wings import Wing

log = logging.getLogger("flowserve.cli")


@contextmanager
def open_cluster(arguments: argparse.Namespace) -> Iterator[Wing]:
    """The cluster of a server as its wing, with --cluster or --placement. Ends what it has started. Raises
    FlowserveError. Blocks.
    """
    choice: ClusterChoice | None = arguments.cluster
    if choice is None:
        raise Invalid("--placement needs --cluster: ray, or local:N for processes of this machine")
    if arguments.placement is None:
        raise Invalid("--cluster needs --placement FILE, which says which models run on other machines")
    placement = read_placement(arguments.placement)
    for warning in placement.warnings:
        log.warning("%s", warning)
    if arguments.cluster_tls is not None:
        client_context(arguments.cluster_tls)  # raises a specific error for bad files
    seconds = float(arguments.cluster_timeout)
    cluster: LocalCluster | RayCluster
    if choice.count:
        cluster = LocalCluster(choice.count)
    else:
        _check_address(placement)
        if find_spec("ray") is None:
            raise Invalid("--cluster ray needs Ray, which is not installed: pip install 'flowserve[ray]'")
        if arguments.cluster_tls is None and not _is_private(placement.address):
            log.warning("tensors cross a network with public addresses without encryption; see --cluster-tls")
        cluster = RayCluster(placement.address, is_insecure=arguments.cluster_insecure, give_up_s=seconds)
    try:
        yield other_machines(ClusterOptions(cluster, seconds, arguments.cluster_tls), placement.places)
    finally:
        cluster.close()


def _check_address(placement: PlacementFile) -> None:
    if not placement.address:
        hint = 'write cluster { address: "HOST:6379" }, the head node\'s; "auto" for the cluster of this machine'
        where = placement.source.place("cluster") if placement.source.places else Place(placement.source.file)
        raise Problems([Problem("the cluster has no address", where, "P1", hint)])


def _is_private(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return not host or ipaddress.ip_address(host).is_private
    except ValueError:  # a name
        return True
