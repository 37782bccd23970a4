"""Rules for a single configuration, one function per numbered rule.

Decides the rules and their numbers, which docs and tests use and which are never reassigned. Every rule always runs, so
that all mistakes of a file are reported at once. Does not know other configurations (`graph/rules`) or the model's own
file (`complete`). Caller: `load`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from flowserve.config.rules import batching, model, tensors
from flowserve.config.rules.subject import Rule, RuleInput
from flowserve.errors import Problem

RULES: Final[Mapping[str, Rule]] = {
    "M1": model.name_is_usable,
    "M2": model.name_is_the_folders,
    "M3": model.backend_is_known,
    "M4": model.ensembles_have_no_backend,
    "M5": model.platform_fits_backend,
    "M6": model.steps_only_on_ensembles,
    "M7": model.ensembles_have_steps,
    "M8": model.max_batch_size_is_not_negative,
    "M9": model.version_policy_names_versions,
    "M10": model.instance_counts_are_sane,
    "M11": model.only_gpu_groups_list_gpus,
    "M12": model.profiles_are_for_tensorrt,
    "M13": model.execution_is_known,
    "M14": model.model_files_are_inside,
    "M15": model.metrics_are_whole,
    "M16": model.cached_models_have_one_response,
    "M17": model.some_instance_serves,
    "M18": model.execution_timeout_is_a_time,
    "M19": model.admission_parameters_are_valid,
    "M20": tensors.every_tensor_has_a_name,
    "M21": tensors.every_tensor_has_a_data_type,
    "M22": tensors.every_tensor_has_dims,
    "M23": tensors.every_dim_is_a_size,
    "M24": tensors.every_reshape_dim_is_a_size,
    "M25": tensors.no_empty_reshape_without_batching,
    "M26": tensors.reshape_keeps_the_element_count,
    "M27": tensors.reshape_keeps_what_varies,
    "M28": tensors.image_formats_have_three_dims,
    "M29": tensors.shape_tensors_are_for_tensorrt,
    "M30": tensors.non_linear_formats_are_for_tensorrt,
    "M31": tensors.no_input_name_twice,
    "M32": tensors.no_output_name_twice,
    "M33": tensors.models_have_outputs,
    "M34": tensors.label_files_are_inside,
    "M35": tensors.batch_inputs_have_one_source,
    "M36": tensors.batch_inputs_are_numbers,
    "M37": tensors.batch_sources_exist,
    "M38": tensors.batch_inputs_have_a_target,
    "M39": tensors.batch_outputs_have_one_source,
    "M40": tensors.batch_output_targets_exist_once,
    "M41": tensors.batch_input_targets_are_their_own,
    "M42": tensors.batch_output_shapes_are_known,
    "M43": tensors.batch_tensors_are_for_whole_batches,
    "M44": model.no_gpu_is_listed_twice,
    "M45": model.requested_gpus_exist,
    "M46": model.gpu_groups_are_for_backends_that_use_gpus,
    "M47": model.cpu_only_parameter_is_valid,
    "M48": model.decoupled_models_are_not_inline,
    "M49": model.processes_are_for_python,
    "M50": batching.preferred_sizes_fit,
    "M51": batching.default_priority_exists,
    "M52": batching.policies_have_a_priority,
    "M53": batching.ordering_has_one_priority,
    "M54": batching.ordering_does_not_delay,
    "M55": tensors.warmup_inputs_are_whole,
    "M56": tensors.warmup_files_exist_inside,
    "M57": tensors.warmup_inputs_exist,
    "M58": tensors.warmup_batches_fit,
    "M60": batching.control_tensors_have_a_name,
    "M61": batching.no_control_tensor_twice,
    "M62": batching.no_control_kind_twice,
    "M63": batching.boolean_controls_have_one_pair,
    "M64": batching.correlation_control_is_an_id,
    "M65": batching.oldest_sizes_fit,
    "M66": batching.slot_utilization_is_a_share,
    "M67": batching.states_begin_once,
    "M68": batching.initial_type_is_the_states,
    "M69": batching.initial_states_have_a_name,
    "M70": batching.initial_dims_fit_the_states,
    "M71": batching.initial_states_have_data,
    "M72": batching.initial_files_are_inside,
    "M73": batching.growing_memory_is_one_buffer,
    "M74": batching.controls_and_states_are_no_inputs,
    "M75": batching.states_are_whole,
    "M80": model.no_instances,
    "M81": model.no_optimization,
    "M82": model.no_warmup,
    "M83": model.has_steps,
    "M84": model.every_step_is_whole,
    "M85": model.every_mapping_has_two_names,
}


def find_problems(subject: RuleInput, rules: Mapping[str, Rule] = RULES) -> list[Problem]:
    """Every violation of every rule, by rule."""
    return [replace(problem, rule=number) for number, rule in rules.items() for problem in rule(subject)]
