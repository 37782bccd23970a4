"""Rules for a model as a whole: name, backend, versions, instances, GPUs, parameters; and for an ensemble's own file.

Decides the checks that Triton makes at the top level of a configuration, and limits that Triton leaves to the operating
system (names, counts, paths). How an ensemble's tensors join is checked in `graph/rules`, where all configurations are
known. What the admission parameters do is decided in `runtime/admission`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from flowserve.config.backends import BACKEND_OF_PLATFORM, BACKENDS_WITH_PLATFORMS, PLATFORM_OF_BACKEND
from flowserve.config.model_config_pb2 import ModelInstanceGroup
from flowserve.config.parameters import ADMISSION_KEYS, FORCE_CPU, parameter_error
from flowserve.config.rules.subject import ENSEMBLE, RuleInput
from flowserve.config.suggest import did_you_mean
from flowserve.config.unsupported import OTHER_BACKENDS
from flowserve.errors import Problem

INSTANCES_MAX: Final = 1024
NAME_MAX_BYTES: Final = 255
EXECUTIONS: Final = ("auto", "inline", "thread", "process", "ray")
NEVER_IN_PROCESSES: Final = frozenset({"callable", "onnxruntime", "tensorrt"})
EXECUTION_SECONDS_MAX: Final = 1_000_000
SCHEDULING: Final = "ensemble_scheduling"
_DECIMAL: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


def name_is_usable(s: RuleInput) -> Iterator[Problem]:
    """A name is one component of a path and of a URL."""
    name = s.name
    if not name.strip() or name in (".", ".."):
        yield s.problem("name", f"Invalid model name: {name!r} is not a name")
    elif "/" in name or "\\" in name or not name.isprintable():
        yield s.problem("name", f"Invalid model name: {name!r} must be one folder's name without control characters")
    elif len(name.encode(errors="replace")) > NAME_MAX_BYTES:
        yield s.problem("name", f"Invalid model name: '{name[:40]}...' is longer than {NAME_MAX_BYTES} bytes")


def name_is_the_folders(s: RuleInput) -> Iterator[Problem]:
    if s.message.name != s.name:
        yield s.problem(
            "name",
            f"unexpected directory name '{s.name}' for model '{s.message.name}', directory name must equal model name",
            hint="rename the folder, or leave `name` out",
        )


def backend_is_known(s: RuleInput) -> Iterator[Problem]:
    m = s.message
    if m.backend or s.is_ensemble:
        return
    if m.platform:
        hint = OTHER_BACKENDS.get(m.platform) or did_you_mean(m.platform, [*BACKEND_OF_PLATFORM, ENSEMBLE])
        hint = hint or f'write `backend: "{m.platform}"`?'
        yield s.problem("platform", f"unexpected platform type '{m.platform}' for {m.name}", hint)
    elif m.default_model_filename:
        text = f"unexpected platform type '' for {m.name}"
        yield s.problem("default_model_filename", text, f"write `backend` beside '{m.default_model_filename}'")
    else:
        yield s.problem(
            "",
            f"Invalid model name: Could not determine backend for model '{m.name}' with no backend in model"
            " configuration. Expected model name of the form 'model.<backend_name>'.",
            hint="put a model.onnx or model.py into a version folder (1/), or write `backend` in config.pbtxt",
        )


def ensembles_have_no_backend(s: RuleInput) -> Iterator[Problem]:
    if s.message.platform == ENSEMBLE and s.message.backend:
        text = f"Ensemble model '{s.message.name}' must have platform type 'ensemble' and empty backend type"
        yield s.problem("backend", text, "leave `backend` out")


def platform_fits_backend(s: RuleInput) -> Iterator[Problem]:
    m = s.message
    if m.platform == ENSEMBLE or m.backend not in BACKENDS_WITH_PLATFORMS:
        return
    if BACKEND_OF_PLATFORM.get(m.platform) != m.backend:
        text = f"unexpected 'platform' and 'backend' pair, got:{m.platform}, {m.backend}"
        yield s.problem("platform", text, f'platform of this backend: "{PLATFORM_OF_BACKEND[m.backend]}"')


def steps_only_on_ensembles(s: RuleInput) -> Iterator[Problem]:
    if s.message.HasField("ensemble_scheduling") and s.message.platform != ENSEMBLE:
        text = f"ensemble scheduling cannot be set for model '{s.message.name}' whose platform is not ensemble"
        yield s.problem("ensemble_scheduling", text, 'write `platform: "ensemble"`')


def ensembles_have_steps(s: RuleInput) -> Iterator[Problem]:
    if s.message.platform == ENSEMBLE and not s.message.HasField("ensemble_scheduling"):
        text = f"ensemble scheduling must be set for ensemble {s.message.name} whose platform is ensemble"
        yield s.problem("platform", text, "add ensemble_scheduling { step [ ... ] }")


def max_batch_size_is_not_negative(s: RuleInput) -> Iterator[Problem]:
    if s.message.max_batch_size < 0:
        text = f"'max_batch_size' must be non-negative value for {s.message.name}"
        yield s.problem("max_batch_size", text, f"found {s.message.max_batch_size}; 0 means no batch dimension")


def version_policy_names_versions(s: RuleInput) -> Iterator[Problem]:
    policy = s.message.version_policy
    text = f"at least one version must be available under the version policy of model '{s.message.name}'"
    choice = policy.WhichOneof("policy_choice")
    if choice == "latest" and policy.latest.num_versions == 0:
        yield s.problem("version_policy.latest", text, "write latest { num_versions: 1 }")
    elif choice == "specific" and not policy.specific.versions:
        yield s.problem("version_policy.specific", text, "write specific { versions: [ 1 ] }")
    for index, version in enumerate(policy.specific.versions):
        if version < 1:
            path = f"version_policy.specific.versions[{index}]"
            yield s.problem(path, f"version {version} of model '{s.message.name}' is not a version", "they start at 1")


def instance_counts_are_sane(s: RuleInput) -> Iterator[Problem]:
    for index, group in enumerate(s.message.instance_group):
        if group.count > INSTANCES_MAX:
            text = f"{_group_label(s, index)} asks for {group.count} instances"
            yield s.problem(f"instance_group[{index}].count", text, f"at most {INSTANCES_MAX} are allowed")


def some_instance_serves(s: RuleInput) -> Iterator[Problem]:
    groups = s.message.instance_group
    if groups and all(group.passive for group in groups):
        text = f"model '{s.message.name}' has passive instance groups only, so that nothing would ever serve a request"
        yield s.problem("instance_group[0].passive", text, "leave `passive` out of one of them")


def profiles_are_for_tensorrt(s: RuleInput) -> Iterator[Problem]:
    for index, group in enumerate(s.message.instance_group):
        name = f"{_group_label(s, index)} and platform {s.message.platform}"
        path = f"instance_group[{index}].profile"
        if group.profile and s.message.platform != "tensorrt_plan":
            text = f"{name} specifies profile field which is only supported for TensorRT models"
            yield s.problem(path, text, "leave `profile` out")
            continue
        for position, profile in enumerate(group.profile):
            if not (profile.isascii() and profile.isdigit()):
                text = f"{name} specifies invalid profile {profile}. The field should contain the string representation"
                yield s.problem(f"{path}[{position}]", f"{text} of a non-negative integer.")


def execution_is_known(s: RuleInput) -> Iterator[Problem]:
    """`execution` is flowserve's own key."""
    value = s.parameter("execution")
    if "execution" in s.message.parameters and value not in EXECUTIONS:
        text = f"parameter 'execution' of model '{s.message.name}' is \"{value}\""
        hint = did_you_mean(value, EXECUTIONS) or f"it is one of {', '.join(EXECUTIONS)}"
        yield s.problem("parameters[execution]", text, hint)


def processes_are_for_python(s: RuleInput) -> Iterator[Problem]:
    """For the built-in backends; plug-ins check this themselves."""
    if s.parameter("execution") == "process" and s.message.backend in NEVER_IN_PROCESSES:
        text = f"model '{s.message.name}': its backend '{s.message.backend}' does not run in processes"
        yield s.problem("parameters[execution]", text, 'use "thread", "inline" or "auto"')


def decoupled_models_are_not_inline(s: RuleInput) -> Iterator[Problem]:
    """On the event loop, a model that blocks in send() would block the loop that reads its responses."""
    if s.parameter("execution") == "inline" and s.message.model_transaction_policy.decoupled:
        text = f"model '{s.message.name}': a decoupled model cannot run inline, where its responses could not be read"
        yield s.problem("parameters[execution]", text, 'use "thread" or "process"')


def execution_timeout_is_a_time(s: RuleInput) -> Iterator[Problem]:
    parameters = s.message.parameters
    if "execution_timeout" not in parameters:
        return
    value = parameters["execution_timeout"].string_value
    if not (_DECIMAL.fullmatch(value) and 0 < float(value) <= EXECUTION_SECONDS_MAX):
        text = f"parameter 'execution_timeout' of model '{s.message.name}' is \"{value}\""
        hint = f'write seconds, more than 0 and at most {EXECUTION_SECONDS_MAX}, such as "2.5"'
        yield s.problem("parameters[execution_timeout]", text, hint)


def model_files_are_inside(s: RuleInput) -> Iterator[Problem]:
    """Every file named for loading is in the version's folder. Links are followed, because models are often links."""
    m = s.message
    named = [("default_model_filename", m.default_model_filename)]
    named += [(f"cc_model_filenames[{key}]", m.cc_model_filenames[key]) for key in sorted(m.cc_model_filenames)]
    named += [
        (f"model_operations.op_library_filename[{index}]", file)
        for index, file in enumerate(m.model_operations.op_library_filename)
    ]
    for path, file in named:
        if "\0" in file or file.startswith("/") or ".." in file.split("/"):
            text = f"file {file!r} of model '{m.name}' leads out of the version's folder"
            yield s.problem(path, text, "name a file in the version's folder")


def metrics_are_whole(s: RuleInput) -> Iterator[Problem]:
    for index, control in enumerate(s.message.model_metrics.metric_control):
        path = f"model_metrics.metric_control[{index}]"
        if not control.HasField("metric_identifier"):
            yield s.problem(path, "metric control must specify 'metric_identifier'")
        elif not control.metric_identifier.family:
            yield s.problem(f"{path}.metric_identifier", "metric identifier must specify non-empty 'family'")
        if not control.HasField("histogram_options"):
            yield s.problem(path, "metric control must specify 'histogram_options'")
        elif not control.histogram_options.buckets:
            yield s.problem(f"{path}.histogram_options", "histogram options must specify non-empty 'buckets'")


def cached_models_have_one_response(s: RuleInput) -> Iterator[Problem]:
    """A cache stores one response per request; sequence models and decoupled models do not fit that."""
    if not s.message.response_cache.enable:
        return
    text = f"Response Cache does not currently support model {s.message.name} with"
    if s.message.HasField("sequence_batching"):
        yield s.problem("response_cache", f"{text} sequence batching scheduler. Please disable the response cache.")
    if s.message.model_transaction_policy.decoupled:
        yield s.problem("response_cache", f"{text} 'decoupled' transaction policy. Please disable the response cache.")


def admission_parameters_are_valid(s: RuleInput) -> Iterator[Problem]:
    for key in ADMISSION_KEYS:
        if key not in s.message.parameters:
            continue
        value = s.message.parameters[key].string_value
        if why := parameter_error(key, value):
            yield s.problem(f"parameters[{key}]", f"model '{s.message.name}': {key} is '{value}'; {why}")


def only_gpu_groups_list_gpus(s: RuleInput) -> Iterator[Problem]:
    for index, group in enumerate(s.message.instance_group):
        name, path = _group_label(s, index), f"instance_group[{index}].gpus"
        if group.gpus and group.kind in (ModelInstanceGroup.KIND_CPU, ModelInstanceGroup.KIND_MODEL):
            kind = ModelInstanceGroup.Kind.Name(group.kind)
            yield s.problem(path, f"{name} has kind {kind} but specifies one or more GPUs")
        for gpu in group.gpus:
            if gpu < 0:
                yield s.problem(path, f"{name} specifies invalid or unsupported gpu id {gpu}")


def no_gpu_is_listed_twice(s: RuleInput) -> Iterator[Problem]:
    for index, group in enumerate(s.message.instance_group):
        for gpu in sorted({gpu for gpu in group.gpus if [*group.gpus].count(gpu) > 1}):
            text = f"{_group_label(s, index)} lists gpu id {gpu} twice"
            yield s.problem(f"instance_group[{index}].gpus", text, "for several instances on each GPU, write `count`")


def requested_gpus_exist(s: RuleInput) -> Iterator[Problem]:
    """Groups without a kind use the CPU instead."""
    for index, group in enumerate(s.message.instance_group):
        if group.kind != ModelInstanceGroup.KIND_GPU or s.gpus.is_assumed:
            continue
        name, path = _group_label(s, index), f"instance_group[{index}]"
        if not s.gpus.ids:
            reason = f": {s.gpus.absence}" if s.gpus.absence else ""
            hint = (
                "write kind: KIND_CPU or leave `kind` out, or start with --gpu=off, which runs such models on the CPU"
            )
            yield s.problem(path, f"{name} has kind KIND_GPU but no GPUs are available{reason}", hint)
            continue
        for gpu in group.gpus:
            if gpu >= 0 and gpu not in s.gpus.ids:
                text = f"{name} specifies invalid or unsupported gpu id {gpu}. GPUs that can be used are:"
                yield s.problem(f"{path}.gpus", f"{text} {', '.join(map(str, s.gpus.ids))}")


def gpu_groups_are_for_backends_that_use_gpus(s: RuleInput) -> Iterator[Problem]:
    for index, group in enumerate(s.message.instance_group):
        if group.kind == ModelInstanceGroup.KIND_GPU and not s.uses_gpus:
            text = (
                f"{_group_label(s, index)} has kind KIND_GPU but backend '{s.message.backend}' computes on the CPU only"
            )
            yield s.problem(f"instance_group[{index}]", text, "write kind: KIND_CPU, or leave `kind` out")


def cpu_only_parameter_is_valid(s: RuleInput) -> Iterator[Problem]:
    """A parameter of Triton's Python backend."""
    if FORCE_CPU not in s.message.parameters:
        return
    value = s.message.parameters[FORCE_CPU].string_value
    if value not in ("yes", "no"):
        text = f"Incorrect value for {FORCE_CPU}: '{value}' of model '{s.message.name}'"
        yield s.problem(f"parameters[{FORCE_CPU}]", text, 'write "yes" (the default) or "no"')


def no_instances(s: RuleInput) -> Iterator[Problem]:
    if s.is_ensemble and s.message.instance_group:
        text = f"instance group should not be specified for ensemble '{s.message.name}'"
        yield s.problem("instance_group", text, "give the models of its steps instances instead")


def no_optimization(s: RuleInput) -> Iterator[Problem]:
    if s.is_ensemble and s.message.HasField("optimization"):
        text = f"optimization should not be specified for ensemble '{s.message.name}'"
        yield s.problem("optimization", text, "it belongs into the models of its steps")


def no_warmup(s: RuleInput) -> Iterator[Problem]:
    if s.is_ensemble and s.message.model_warmup:
        text = f"model_warmup can not be specified for ensemble '{s.message.name}'"
        yield s.problem("model_warmup", text, "warm up the models of its steps instead")


def has_steps(s: RuleInput) -> Iterator[Problem]:
    if s.message.HasField(SCHEDULING) and not s.message.ensemble_scheduling.step:
        yield s.problem(SCHEDULING, f"must specify 'step' for ensemble '{s.message.name}'")


def every_step_is_whole(s: RuleInput) -> Iterator[Problem]:
    for index, step in enumerate(s.message.ensemble_scheduling.step):
        given = {"model_name": step.model_name, "input_map": step.input_map, "output_map": step.output_map}
        for field, value in given.items():
            if not value:
                text = f"must specify '{field}' in step {index} of ensemble '{s.message.name}'"
                yield s.problem(f"{SCHEDULING}.step[{index}]", text)


def every_mapping_has_two_names(s: RuleInput) -> Iterator[Problem]:
    for index, step in enumerate(s.message.ensemble_scheduling.step):
        for field, mapping in (("input_map", step.input_map), ("output_map", step.output_map)):
            for port, tensor in mapping.items():
                if not port or not tensor:
                    missing = "value" if port else "key"
                    text = f"{field} entry without '{missing}' in step {index} of ensemble '{s.message.name}'"
                    hint = "key is the model's tensor, value the ensemble's"
                    yield s.problem(f"{SCHEDULING}.step[{index}].{field}[{port}]", text, hint)


def _group_label(s: RuleInput, index: int) -> str:
    group = s.message.instance_group[index]
    return f"instance group {group.name or f'{s.message.name}_{index}'} of model {s.message.name}"
