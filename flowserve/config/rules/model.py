"""Rules for a model as a whole: name, backend, versions, instances, GPUs, parameters; and for an ensemble's own file.

Decides the checks that Triton makes at the top level of a configuration, and limits that Triton leaves to the operating
system (names, counts, paths). How an ensemble's tensors join is checked in `graph/rules`, where all configurations are
known. What the admission parameters do is decided in `runtime/admission`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from flowserve.config.backends import BACKEND_OF_PLATFORM, OTHER_BACKENDS, PLATFORM_OF_BACKEND
from flowserve.config.model_config_pb2 import ModelInstanceGroup
from flowserve.config.parameters import ADMISSION_KEYS, FORCE_CPU, parameter_error
from flowserve.config.rules import ENSEMBLE, RuleInput
from flowserve.config.suggest import did_you_mean
from flowserve.errors import Problem

INSTANCES_MAX: Final = 1024
NAME_MAX_BYTES: Final = 255
EXECUTIONS: Final = ("auto", "inline", "thread", "process", "ray")
NEVER_IN_PROCESSES: Final = frozenset({"callable", "onnxruntime", "tensorrt"})
EXECUTION_SECONDS_MAX: Final = 1_000_000
SCHEDULING: Final = "ensemble_scheduling"
_DECIMAL: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


def name(s: RuleInput) -> Iterator[Problem]:
    """A name is one component of a path and of a URL; it is the name of the model's folder."""
    folder = s.folder.name
    if not folder.strip() or folder in (".", ".."):
        yield s.problem("M1", "name", f"Invalid model name: {folder!r} is not a name")
    elif "/" in folder or "\\" in folder or not folder.isprintable():
        text = f"Invalid model name: {folder!r} must be one folder's name without control characters"
        yield s.problem("M1", "name", text)
    elif len(folder.encode(errors="replace")) > NAME_MAX_BYTES:
        yield s.problem("M1", "name", f"Invalid model name: '{folder[:40]}...' is longer than {NAME_MAX_BYTES} bytes")
    if s.message.name != folder:
        text = f"unexpected directory name '{folder}' for model '{s.message.name}', directory name must equal"
        yield s.problem("M2", "name", f"{text} model name", "rename the folder, or leave `name` out")


def backend_is_known(s: RuleInput) -> Iterator[Problem]:
    m = s.message
    if m.backend or s.is_ensemble:
        return
    if m.platform:
        hint = OTHER_BACKENDS.get(m.platform) or did_you_mean(m.platform, [*BACKEND_OF_PLATFORM, ENSEMBLE])
        hint = hint or f'write `backend: "{m.platform}"`?'
        yield s.problem("M3", "platform", f"unexpected platform type '{m.platform}' for {m.name}", hint)
    elif m.default_model_filename:
        text = f"unexpected platform type '' for {m.name}"
        yield s.problem("M3", "default_model_filename", text, f"write `backend` beside '{m.default_model_filename}'")
    else:
        text = f"Invalid model name: Could not determine backend for model '{m.name}' with no backend in model"
        text = f"{text} configuration. Expected model name of the form 'model.<backend_name>'."
        hint = "put a model.onnx or model.py into a version folder (1/), or write `backend` in config.pbtxt"
        yield s.problem("M3", "", text, hint)


def platform_fits_backend(s: RuleInput) -> Iterator[Problem]:
    m = s.message
    if m.platform == ENSEMBLE and m.backend:
        text = f"Ensemble model '{m.name}' must have platform type 'ensemble' and empty backend type"
        yield s.problem("M4", "backend", text, "leave `backend` out")
    wanted = PLATFORM_OF_BACKEND.get(m.backend)
    if wanted and m.platform != ENSEMBLE and BACKEND_OF_PLATFORM.get(m.platform) != m.backend:
        text = f"unexpected 'platform' and 'backend' pair, got:{m.platform}, {m.backend}"
        yield s.problem("M5", "platform", text, f'platform of this backend: "{wanted}"')


def batch_size_and_versions(s: RuleInput) -> Iterator[Problem]:
    m = s.message
    if m.max_batch_size < 0:
        text = f"'max_batch_size' must be non-negative value for {m.name}"
        yield s.problem("M8", "max_batch_size", text, f"found {m.max_batch_size}; 0 means no batch dimension")
    policy = m.version_policy
    text = f"at least one version must be available under the version policy of model '{m.name}'"
    choice = policy.WhichOneof("policy_choice")
    if choice == "latest" and policy.latest.num_versions == 0:
        yield s.problem("M9", "version_policy.latest", text, "write latest { num_versions: 1 }")
    elif choice == "specific" and not policy.specific.versions:
        yield s.problem("M9", "version_policy.specific", text, "write specific { versions: [ 1 ] }")
    for index, version in enumerate(policy.specific.versions):
        if version < 1:
            text = f"version {version} of model '{m.name}' is not a version"
            yield s.problem("M9", f"version_policy.specific.versions[{index}]", text, "they start at 1")


def instance_groups(s: RuleInput) -> Iterator[Problem]:
    m = s.message
    for index, group in enumerate(m.instance_group):
        label = f"instance group {group.name or f'{m.name}_{index}'} of model {m.name}"
        path = f"instance_group[{index}]"
        if group.count > INSTANCES_MAX:
            text = f"{label} asks for {group.count} instances"
            yield s.problem("M10", f"{path}.count", text, f"at most {INSTANCES_MAX} are allowed")
        if group.gpus and group.kind in (ModelInstanceGroup.KIND_CPU, ModelInstanceGroup.KIND_MODEL):
            kind = ModelInstanceGroup.Kind.Name(group.kind)
            yield s.problem("M11", f"{path}.gpus", f"{label} has kind {kind} but specifies one or more GPUs")
        for gpu in group.gpus:
            if gpu < 0:
                yield s.problem("M11", f"{path}.gpus", f"{label} specifies invalid or unsupported gpu id {gpu}")
        on_platform = f"{label} and platform {m.platform}"
        if group.profile and m.platform != "tensorrt_plan":
            text = f"{on_platform} specifies profile field which is only supported for TensorRT models"
            yield s.problem("M12", f"{path}.profile", text, "leave `profile` out")
        else:
            for position, profile in enumerate(group.profile):
                if not (profile.isascii() and profile.isdigit()):
                    text = f"{on_platform} specifies invalid profile {profile}. The field should contain the string"
                    text = f"{text} representation of a non-negative integer."
                    yield s.problem("M12", f"{path}.profile[{position}]", text)
        for gpu in sorted({gpu for gpu in group.gpus if [*group.gpus].count(gpu) > 1}):
            text = f"{label} lists gpu id {gpu} twice"
            yield s.problem("M44", f"{path}.gpus", text, "for several instances on each GPU, write `count`")
        if group.kind == ModelInstanceGroup.KIND_GPU:  # groups without a kind use the CPU instead of missing GPUs
            if not s.gpus.is_assumed:
                yield from _requested_gpus_exist(s, path, label, group)
            if not s.uses_gpus:
                text = f"{label} has kind KIND_GPU but backend '{m.backend}' computes on the CPU only"
                yield s.problem("M46", path, text, "write kind: KIND_CPU, or leave `kind` out")
    if m.instance_group and all(group.passive for group in m.instance_group):
        text = f"model '{m.name}' has passive instance groups only, so that nothing would ever serve a request"
        yield s.problem("M17", "instance_group[0].passive", text, "leave `passive` out of one of them")


def _requested_gpus_exist(s: RuleInput, path: str, label: str, group: ModelInstanceGroup) -> Iterator[Problem]:
    if not s.gpus.ids:
        reason = f": {s.gpus.absence}" if s.gpus.absence else ""
        hint = "write kind: KIND_CPU or leave `kind` out, or start with --gpu=off, which runs such models on the CPU"
        yield s.problem("M45", path, f"{label} has kind KIND_GPU but no GPUs are available{reason}", hint)
        return
    for gpu in group.gpus:
        if gpu >= 0 and gpu not in s.gpus.ids:
            text = f"{label} specifies invalid or unsupported gpu id {gpu}. GPUs that can be used are:"
            yield s.problem("M45", f"{path}.gpus", f"{text} {', '.join(map(str, s.gpus.ids))}")


def execution(s: RuleInput) -> Iterator[Problem]:
    """`execution` and `execution_timeout` are flowserve's own keys."""
    m = s.message
    value, path = s.parameter("execution"), "parameters[execution]"
    if "execution" in m.parameters and value not in EXECUTIONS:
        text = f"parameter 'execution' of model '{m.name}' is \"{value}\""
        yield s.problem("M13", path, text, did_you_mean(value, EXECUTIONS) or f"it is one of {', '.join(EXECUTIONS)}")
    timeout = s.parameter("execution_timeout")
    is_time = _DECIMAL.fullmatch(timeout) and 0 < float(timeout) <= EXECUTION_SECONDS_MAX
    if "execution_timeout" in m.parameters and not is_time:
        text = f"parameter 'execution_timeout' of model '{m.name}' is \"{timeout}\""
        hint = f'write seconds, more than 0 and at most {EXECUTION_SECONDS_MAX}, such as "2.5"'
        yield s.problem("M18", "parameters[execution_timeout]", text, hint)
    # On the event loop, a model that blocks in send() would block the loop that reads its responses.
    if value == "inline" and m.model_transaction_policy.decoupled:
        text = f"model '{m.name}': a decoupled model cannot run inline, where its responses could not be read"
        yield s.problem("M48", path, text, 'use "thread" or "process"')
    if value == "process" and m.backend in NEVER_IN_PROCESSES:  # plug-ins check this themselves
        text = f"model '{m.name}': its backend '{m.backend}' does not run in processes"
        yield s.problem("M49", path, text, 'use "thread", "inline" or "auto"')


def other_parameters(s: RuleInput) -> Iterator[Problem]:
    """The limits of admission control, and a parameter of Triton's Python backend."""
    m = s.message
    for key in ADMISSION_KEYS:
        if key in m.parameters and (why := parameter_error(key, s.parameter(key))):
            yield s.problem("M19", f"parameters[{key}]", f"model '{m.name}': {key} is '{s.parameter(key)}'; {why}")
    if FORCE_CPU in m.parameters and s.parameter(FORCE_CPU) not in ("yes", "no"):
        text = f"Incorrect value for {FORCE_CPU}: '{s.parameter(FORCE_CPU)}' of model '{m.name}'"
        yield s.problem("M47", f"parameters[{FORCE_CPU}]", text, 'write "yes" (the default) or "no"')


def model_files(s: RuleInput) -> Iterator[Problem]:
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
            yield s.problem("M14", path, text, "name a file in the version's folder")


def metrics(s: RuleInput) -> Iterator[Problem]:
    for index, control in enumerate(s.message.model_metrics.metric_control):
        path = f"model_metrics.metric_control[{index}]"
        if not control.HasField("metric_identifier"):
            yield s.problem("M15", path, "metric control must specify 'metric_identifier'")
        elif not control.metric_identifier.family:
            yield s.problem("M15", f"{path}.metric_identifier", "metric identifier must specify non-empty 'family'")
        if not control.HasField("histogram_options"):
            yield s.problem("M15", path, "metric control must specify 'histogram_options'")
        elif not control.histogram_options.buckets:
            yield s.problem("M15", f"{path}.histogram_options", "histogram options must specify non-empty 'buckets'")


def response_cache(s: RuleInput) -> Iterator[Problem]:
    """A cache stores one response per request; sequence models and decoupled models do not fit that."""
    m = s.message
    unfit = {
        "sequence batching scheduler": m.HasField("sequence_batching"),
        "'decoupled' transaction policy": m.model_transaction_policy.decoupled,
    }
    for feature, is_used in unfit.items():
        if m.response_cache.enable and is_used:
            text = f"Response Cache does not currently support model {m.name} with {feature}."
            yield s.problem("M16", "response_cache", f"{text} Please disable the response cache.")


def ensemble(s: RuleInput) -> Iterator[Problem]:
    m = s.message
    scheduling = m.ensemble_scheduling
    if m.HasField(SCHEDULING) and m.platform != ENSEMBLE:
        text = f"ensemble scheduling cannot be set for model '{m.name}' whose platform is not ensemble"
        yield s.problem("M6", SCHEDULING, text, 'write `platform: "ensemble"`')
    if m.platform == ENSEMBLE and not m.HasField(SCHEDULING):
        text = f"ensemble scheduling must be set for ensemble {m.name} whose platform is ensemble"
        yield s.problem("M7", "platform", text, "add ensemble_scheduling { step [ ... ] }")
    if s.is_ensemble and m.instance_group:
        text = f"instance group should not be specified for ensemble '{m.name}'"
        yield s.problem("M80", "instance_group", text, "give the models of its steps instances instead")
    if s.is_ensemble and m.HasField("optimization"):
        text = f"optimization should not be specified for ensemble '{m.name}'"
        yield s.problem("M81", "optimization", text, "it belongs into the models of its steps")
    if s.is_ensemble and m.model_warmup:
        text = f"model_warmup can not be specified for ensemble '{m.name}'"
        yield s.problem("M82", "model_warmup", text, "warm up the models of its steps instead")
    if m.HasField(SCHEDULING) and not scheduling.step:
        yield s.problem("M83", SCHEDULING, f"must specify 'step' for ensemble '{m.name}'")
    for index, step in enumerate(scheduling.step):
        path, where = f"{SCHEDULING}.step[{index}]", f"in step {index} of ensemble '{m.name}'"
        maps = {"input_map": step.input_map, "output_map": step.output_map}
        for field, value in {"model_name": step.model_name, **maps}.items():
            if not value:
                yield s.problem("M84", path, f"must specify '{field}' {where}")
        for field, mapping in maps.items():
            for port, tensor in mapping.items():
                if not port or not tensor:
                    text = f"{field} entry without '{'value' if port else 'key'}' {where}"
                    hint = "key is the model's tensor, value the ensemble's"
                    yield s.problem("M85", f"{path}.{field}[{port}]", text, hint)
