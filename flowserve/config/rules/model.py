"""Rules about a model as a whole: its name, its backend, its versions, its instances.

Decided here: what Triton decides when it validates the top level of a configuration, and the limits it leaves to the
operating system (names, counts, paths).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from flowserve.config.backends import BACKEND_OF_PLATFORM, BACKENDS_WITH_PLATFORMS, PLATFORM_OF_BACKEND
from flowserve.config.rules.subject import ENSEMBLE, Subject
from flowserve.config.suggest import did_you_mean
from flowserve.config.unsupported import OTHER_BACKENDS
from flowserve.errors import Problem

INSTANCES_MAX: Final = 1024
NAME_MAX_BYTES: Final = 255
EXECUTIONS: Final = ("auto", "inline", "thread", "process", "ray")
NEVER_IN_PROCESSES: Final = frozenset({"callable", "onnxruntime", "tensorrt"})
EXECUTION_SECONDS_MAX: Final = 1_000_000
_DECIMAL: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


def name_is_usable(s: Subject) -> Iterator[Problem]:
    """A name is one component of a path and of a URL."""
    name = s.name
    if not name.strip() or name in (".", ".."):
        yield s.problem("name", f"Invalid model name: {name!r} is not a name")
    elif "/" in name or "\\" in name or not name.isprintable():
        yield s.problem("name", f"Invalid model name: {name!r} must be one folder's name without control characters")
    elif len(name.encode(errors="replace")) > NAME_MAX_BYTES:
        yield s.problem("name", f"Invalid model name: '{name[:40]}...' is longer than {NAME_MAX_BYTES} bytes")


def name_is_the_folders(s: Subject) -> Iterator[Problem]:
    if s.message.name != s.name:
        yield s.problem(
            "name",
            f"unexpected directory name '{s.name}' for model '{s.message.name}', directory name must equal model name",
            hint="rename the folder, or leave `name` out",
        )


def backend_is_known(s: Subject) -> Iterator[Problem]:
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


def ensembles_have_no_backend(s: Subject) -> Iterator[Problem]:
    if s.message.platform == ENSEMBLE and s.message.backend:
        text = f"Ensemble model '{s.message.name}' must have platform type 'ensemble' and empty backend type"
        yield s.problem("backend", text, "leave `backend` out")


def platform_fits_backend(s: Subject) -> Iterator[Problem]:
    m = s.message
    if m.platform == ENSEMBLE or m.backend not in BACKENDS_WITH_PLATFORMS:
        return
    if BACKEND_OF_PLATFORM.get(m.platform) != m.backend:
        text = f"unexpected 'platform' and 'backend' pair, got:{m.platform}, {m.backend}"
        yield s.problem("platform", text, f'platform of this backend: "{PLATFORM_OF_BACKEND[m.backend]}"')


def steps_only_on_ensembles(s: Subject) -> Iterator[Problem]:
    if s.message.HasField("ensemble_scheduling") and s.message.platform != ENSEMBLE:
        text = f"ensemble scheduling cannot be set for model '{s.message.name}' whose platform is not ensemble"
        yield s.problem("ensemble_scheduling", text, 'write `platform: "ensemble"`')


def ensembles_have_steps(s: Subject) -> Iterator[Problem]:
    if s.message.platform == ENSEMBLE and not s.message.HasField("ensemble_scheduling"):
        text = f"ensemble scheduling must be set for ensemble {s.message.name} whose platform is ensemble"
        yield s.problem("platform", text, "add ensemble_scheduling { step [ ... ] }")


def max_batch_size_is_not_negative(s: Subject) -> Iterator[Problem]:
    if s.message.max_batch_size < 0:
        text = f"'max_batch_size' must be non-negative value for {s.message.name}"
        yield s.problem("max_batch_size", text, f"found {s.message.max_batch_size}; 0 means no batch dimension")


def version_policy_names_versions(s: Subject) -> Iterator[Problem]:
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


def instance_counts_are_sane(s: Subject) -> Iterator[Problem]:
    for index, group in enumerate(s.message.instance_group):
        if group.count > INSTANCES_MAX:
            text = f"instance group {_group_name(s, index)} of model {s.message.name} asks for {group.count} instances"
            yield s.problem(f"instance_group[{index}].count", text, f"at most {INSTANCES_MAX} are allowed")


def some_instance_serves(s: Subject) -> Iterator[Problem]:
    groups = s.message.instance_group
    if groups and all(group.passive for group in groups):
        text = f"model '{s.message.name}' has passive instance groups only, so that nothing would ever serve a request"
        yield s.problem("instance_group[0].passive", text, "leave `passive` out of one of them")


def profiles_are_for_tensorrt(s: Subject) -> Iterator[Problem]:
    for index, group in enumerate(s.message.instance_group):
        name = f"instance group {_group_name(s, index)} of model {s.message.name} and platform {s.message.platform}"
        path = f"instance_group[{index}].profile"
        if group.profile and s.message.platform != "tensorrt_plan":
            text = f"{name} specifies profile field which is only supported for TensorRT models"
            yield s.problem(path, text, "leave `profile` out")
            continue
        for position, profile in enumerate(group.profile):
            if not (profile.isascii() and profile.isdigit()):
                text = f"{name} specifies invalid profile {profile}. The field should contain the string representation"
                yield s.problem(f"{path}[{position}]", f"{text} of a non-negative integer.")


def execution_is_known(s: Subject) -> Iterator[Problem]:
    """`execution` is flowserve's own key, so nobody but us can tell that it is misspelt."""
    value = s.message.parameters["execution"].string_value if "execution" in s.message.parameters else ""
    if "execution" in s.message.parameters and value not in EXECUTIONS:
        text = f"parameter 'execution' of model '{s.message.name}' is \"{value}\""
        hint = did_you_mean(value, EXECUTIONS) or f"it is one of {', '.join(EXECUTIONS)}"
        yield s.problem("parameters[execution]", text, hint)


def processes_are_for_python(s: Subject) -> Iterator[Problem]:
    """Of the backends that are part of this package; others know for themselves."""
    execution = s.message.parameters["execution"].string_value if "execution" in s.message.parameters else ""
    if execution == "process" and s.message.backend in NEVER_IN_PROCESSES:
        text = f"model '{s.message.name}': its backend '{s.message.backend}' does not run in processes"
        yield s.problem("parameters[execution]", text, 'use "thread", "inline" or "auto"')


def somebody_reads_what_decoupled_models_send(s: Subject) -> Iterator[Problem]:
    """On the event loop a model that waits in its send would wait for the loop itself."""
    execution = s.message.parameters["execution"].string_value if "execution" in s.message.parameters else ""
    if execution == "inline" and s.message.model_transaction_policy.decoupled:
        text = f"model '{s.message.name}': a decoupled model cannot run inline, where nobody would read what it sends"
        yield s.problem("parameters[execution]", text, 'use "thread" or "process"')


def execution_timeout_is_a_time(s: Subject) -> Iterator[Problem]:
    parameters = s.message.parameters
    if "execution_timeout" not in parameters:
        return
    value = parameters["execution_timeout"].string_value
    if not (_DECIMAL.fullmatch(value) and 0 < float(value) <= EXECUTION_SECONDS_MAX):
        text = f"parameter 'execution_timeout' of model '{s.message.name}' is \"{value}\""
        hint = f'write seconds, more than 0 and at most {EXECUTION_SECONDS_MAX}, such as "2.5"'
        yield s.problem("parameters[execution_timeout]", text, hint)


def model_files_are_inside(s: Subject) -> Iterator[Problem]:
    """Every file named for loading lies in the version's folder. Links are followed: models are often linked in."""
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


def metrics_are_whole(s: Subject) -> Iterator[Problem]:
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


def cache_has_one_answer(s: Subject) -> Iterator[Problem]:
    """A cache remembers one answer per request; sequences and decoupled models have more to them."""
    if not s.message.response_cache.enable:
        return
    text = f"Response Cache does not currently support model {s.message.name} with"
    if s.message.HasField("sequence_batching"):
        yield s.problem("response_cache", f"{text} sequence batching scheduler. Please disable the response cache.")
    if s.message.model_transaction_policy.decoupled:
        yield s.problem("response_cache", f"{text} 'decoupled' transaction policy. Please disable the response cache.")


def _group_name(s: Subject, index: int) -> str:
    return s.message.instance_group[index].name or f"{s.message.name}_{index}"
