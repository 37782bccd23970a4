"""Fields that are read and then left alone: hints about speed or naming on hardware that is not here.

Decided here: which those are. Each is told once per load in the log, so that nobody wonders.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flowserve.config.types import SourceMap

IGNORED: Final = (
    "optimization.priority",
    "optimization.cuda.busy_wait_events",
    "optimization.cuda.output_copy_stream",
    "optimization.execution_accelerators.cpu_execution_accelerator",
    "optimization.input_pinned_memory",
    "optimization.output_pinned_memory",
    "optimization.gather_kernel_buffer_threshold",
    "optimization.eager_batching",
    "cc_model_filenames",
    "metric_tags",
    "model_metrics",
    "runtime",
)
IGNORED_IN_GROUPS: Final = ("secondary_devices", "host_policy")


def ignored_fields(source: SourceMap, group_count: int) -> Iterator[str]:
    """The paths of the ignored fields that the user wrote."""
    yield from (path for path in IGNORED if path in source.places)
    for index in range(group_count):
        for field in IGNORED_IN_GROUPS:
            if (path := f"instance_group[{index}].{field}") in source.places:
                yield path
