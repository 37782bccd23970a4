"""Writes down what a configuration leaves unsaid, as Triton does, so that everybody reads the same defaults.

Decided here: every default of the file, and which of them go again where the file comes back changed. How many copies
a model gets by default is for its backend to say, and is handed in.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import Final

from flowserve.config.instances import NO_GPUS, Gpus
from flowserve.config.model_config_pb2 import ModelConfig as ModelConfigProto
from flowserve.config.model_config_pb2 import ModelInstanceGroup
from flowserve.config.types import Completion, ModelConfig

SEQUENCE_IDLE_DEFAULT_US: Final = 1_000_000


def fill_defaults(message: ModelConfigProto, completion: Completion | None = None, gpus: Gpus = NO_GPUS) -> None:
    """Apply all defaults in place. `completion` says how many instances the backend wants where a group does not say.
    Applying them twice changes nothing.
    """
    if message.version_policy.WhichOneof("policy_choice") is None:
        message.version_policy.latest.num_versions = 1
    if message.HasField("dynamic_batching"):
        _prefer_the_largest(message.dynamic_batching.preferred_batch_size, message.max_batch_size)
    if message.HasField("sequence_batching"):
        batching = message.sequence_batching
        batching.max_sequence_idle_microseconds = batching.max_sequence_idle_microseconds or SEQUENCE_IDLE_DEFAULT_US
        if batching.HasField("oldest"):
            _prefer_the_largest(batching.oldest.preferred_batch_size, message.max_batch_size)
    if message.HasField("ensemble_scheduling"):
        message.model_transaction_policy.decoupled = False  # what its steps are decides, and none of them is
    else:
        _fill_pinned_memory(message)
        _fill_instance_groups(message, completion or Completion(), gpus)


def forget_defaults(message: ModelConfigProto, served: ModelConfig) -> None:
    """Take out of a configuration that was read from a server what had been filled in there, where it would no longer
    fit: with another max_batch_size another size is preferred. `served`: what that name is, or was last.
    """
    if message.max_batch_size == served.max_batch_size:
        return
    for sizes in (
        message.dynamic_batching.preferred_batch_size,
        message.sequence_batching.oldest.preferred_batch_size,
    ):
        if [*sizes] == [served.max_batch_size]:
            del sizes[:]


def _prefer_the_largest(sizes: MutableSequence[int], max_batch_size: int) -> None:
    if not sizes and max_batch_size > 0:
        sizes.append(max_batch_size)


def _fill_pinned_memory(message: ModelConfigProto) -> None:
    for name in ("input_pinned_memory", "output_pinned_memory"):
        if not message.optimization.HasField(name):
            getattr(message.optimization, name).enable = True


def _fill_instance_groups(message: ModelConfigProto, completion: Completion, gpus: Gpus) -> None:
    """A model without any group has one of its own name; one of several groups is numbered. A group that leaves its
    kind open is on the GPUs it lists, or on all, where these are there and its backend uses them; else on the CPU.
    """
    if not message.instance_group:
        message.instance_group.add(name=message.name)
    for index, group in enumerate(message.instance_group):
        group.name = group.name or f"{message.name}_{index}"
        if group.kind == ModelInstanceGroup.KIND_AUTO:
            can_use = gpus.ids and completion.gpu_instance_count and set(group.gpus) <= set(gpus.ids)
            group.kind = ModelInstanceGroup.KIND_GPU if can_use else ModelInstanceGroup.KIND_CPU
            if not can_use:
                del group.gpus[:]
        is_on_gpus = group.kind == ModelInstanceGroup.KIND_GPU
        if is_on_gpus and not group.gpus:
            group.gpus.extend(gpus.ids)
        if group.count < 1:
            group.count = completion.gpu_instance_count if is_on_gpus else completion.instance_count


def gpus_to_cpu(message: ModelConfigProto) -> list[str]:
    """Put every group on the CPU, as `--gpu=off` asks. Returns the names of those that had asked for a GPU."""
    moved = []
    for index, group in enumerate(message.instance_group):
        if group.kind == ModelInstanceGroup.KIND_GPU:
            moved.append(group.name or f"{message.name}_{index}")
            group.kind = ModelInstanceGroup.KIND_CPU
            del group.gpus[:]
    return moved
