"""Decides which versions of a served model a load leaves as they are.

A version is loaded anew if a file of its folder changed, and all are if a file changed that the versions share, or the
configuration. The configuration is compared by its fields as they are in force, completed ones included, and not by its
text; the version policy selects versions and changes none. Does not know how versions are loaded or kept. Callers:
`runtime/loading`.
"""

from __future__ import annotations

from flowserve.config.types import is_same_but_versions
from flowserve.repository.read import ReadModel
from flowserve.repository.snapshot import Contents


def unchanged_versions(served: ReadModel, before: Contents, read: ReadModel, now: Contents) -> tuple[int, ...]:
    """The versions of `read`, from a folder with the contents `now`, that are equal in `served`, with `before`."""
    if before.shared != now.shared or not is_same_but_versions(served.config, read.config):
        return ()
    return tuple(
        version
        for version in read.versions
        if version in served.versions and before.versions.get(version) == now.versions.get(version)
    )
