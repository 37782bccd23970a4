"""Rules for a single configuration: each function checks one part of it, and yields the violations of numbered rules.

Decides the rules and their numbers, which docs and tests use and which are never reassigned. Every rule always runs, so
that all mistakes of a file are reported at once. Does not know other configurations (`graph/rules`) or the model's own
file (`complete`, backends). Callers: `load` and `unsupported`.

For a model as a whole (name, backend, versions, instances, GPUs, parameters; an ensemble's own file), decides the
checks that Triton makes at the top level of a configuration, and limits that Triton leaves to the operating system
(names, counts, paths). How an ensemble's tensors join is checked in `graph/rules`, where all configurations are known.
What the admission parameters do is decided in `runtime/admission`.

For inputs and outputs, reshapes, label files, batch inputs and batch outputs, and warm-up samples, decides the checks
that Triton makes, with its texts; that names of inputs are unique and a model has outputs (a Python model may have
none); and errors of batch inputs and outputs that Triton finds only when a batch runs: inputs that clients cannot send
because the server computes them, unknown shapes of batch outputs, and models that do not take a batch as one tensor.

For the dynamic batcher and for sequence batching (queues, control tensors, strategies, implicit state), decides which
settings are invalid or contradict each other, as on Triton. Does not know their effect (`scheduling`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

from flowserve.config import model_config_pb2 as pb
from flowserve.config.backends import BACKEND_OF_PLATFORM, OTHER_BACKENDS, PLATFORM_OF_BACKEND, misnamed_model
from flowserve.config.parameters import ADMISSION_KEYS, FORCE_CPU, parameter_error
from flowserve.config.suggest import did_you_mean
from flowserve.config.types import NO_GPUS, Gpus, SourceMap
from flowserve.errors import Problem
from flowserve.values import shape_text


@dataclass(frozen=True, slots=True)
class RuleInput:
    """One configuration: names filled in, completed from the model's files, defaults not yet applied.

    `message.name` is the name in the file. `gpus` are the available ones; `uses_gpus`: the model's backend can use a
    GPU. `is_strict`: the model's files have completed nothing.
    """

    message: pb.ModelConfig
    source: SourceMap
    folder: Path
    gpus: Gpus = NO_GPUS
    uses_gpus: bool = True
    is_strict: bool = False

    @property
    def is_ensemble(self) -> bool:
        return self.message.platform == ENSEMBLE or self.message.HasField("ensemble_scheduling")

    def tensors(self) -> Iterator[tuple[str, str, pb.ModelInput | pb.ModelOutput]]:
        """(path, "input 'X'", tensor) of every input, then every output."""
        for index, given in enumerate(self.message.input):
            yield f"input[{index}]", f"input '{given.name}'", given
        for index, made in enumerate(self.message.output):
            yield f"output[{index}]", f"output '{made.name}'", made

    def parameter(self, key: str) -> str:
        """The value of a parameter, "" if it is missing."""
        return self.message.parameters[key].string_value if key in self.message.parameters else ""

    def problem(self, rule: str, path: str, message: str, hint: str = "") -> Problem:
        """A violation of rule number `rule` in the field `path`."""
        return Problem(message, self.source.place(path), rule, hint)

    def path_error(self, *parts: str) -> str:
        """The error if the path of `parts` leads out of the model's folder, or cannot be resolved; else ""."""
        try:
            home = self.folder.resolve()
            leads_out = not home.joinpath(*parts).resolve().is_relative_to(home)
        except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a zero byte
            return f"cannot be followed: {error}" if isinstance(error, ValueError) else "is a loop of links"
        return "leads out of the model's folder" if leads_out else ""


ENSEMBLE = "ensemble"
Rule = Callable[[RuleInput], Iterator[Problem]]


# ---------------------------------------------------------------------------------------------- the model as a whole

INSTANCES_MAX: Final = 1024
NAME_MAX_BYTES: Final = 255
EXECUTIONS: Final = ("auto", "inline", "thread", "process", "remote", "ray")
NEVER_IN_PROCESSES: Final = frozenset({"callable", "onnxruntime", "tensorrt", "remote"})
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
        hint = misnamed_model(s.folder)
        hint = hint or "put a model.onnx or model.py into a version folder (1/), or write `backend` in config.pbtxt"
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
        if group.gpus and group.kind in (pb.ModelInstanceGroup.KIND_CPU, pb.ModelInstanceGroup.KIND_MODEL):
            kind = pb.ModelInstanceGroup.Kind.Name(group.kind)
            yield s.problem("M11", f"{path}.gpus", f"{label} has kind {kind} but specifies one or more GPUs")
        for gpu in group.gpus:
            if gpu < 0:
                yield s.problem("M11", f"{path}.gpus", f"{label} specifies invalid or unsupported gpu id {gpu}")
        yield from _profiles_fit(s, path, label, group)
        for gpu in sorted({gpu for gpu in group.gpus if [*group.gpus].count(gpu) > 1}):
            text = f"{label} lists gpu id {gpu} twice"
            yield s.problem("M44", f"{path}.gpus", text, "for several instances on each GPU, write `count`")
        if group.kind == pb.ModelInstanceGroup.KIND_GPU:  # groups without a kind use the CPU instead of missing GPUs
            if not s.gpus.is_assumed:
                yield from _requested_gpus_exist(s, path, label, group)
            if not s.uses_gpus:
                text = f"{label} has kind KIND_GPU but backend '{m.backend}' computes on the CPU only"
                yield s.problem("M46", path, text, "write kind: KIND_CPU, or leave `kind` out")
    if m.instance_group and all(group.passive for group in m.instance_group):
        text = f"model '{m.name}' has passive instance groups only, so that nothing would ever serve a request"
        yield s.problem("M17", "instance_group[0].passive", text, "leave `passive` out of one of them")


def _profiles_fit(s: RuleInput, path: str, label: str, group: pb.ModelInstanceGroup) -> Iterator[Problem]:
    on_platform = f"{label} and platform {s.message.platform}"
    if group.profile and s.message.platform != "tensorrt_plan":
        text = f"{on_platform} specifies profile field which is only supported for TensorRT models"
        yield s.problem("M12", f"{path}.profile", text, "leave `profile` out")
        return
    for position, profile in enumerate(group.profile):
        if not (profile.isascii() and profile.isdigit()):
            text = f"{on_platform} specifies invalid profile {profile}. The field should contain the string"
            text = f"{text} representation of a non-negative integer."
            yield s.problem("M12", f"{path}.profile[{position}]", text)


def _requested_gpus_exist(s: RuleInput, path: str, label: str, group: pb.ModelInstanceGroup) -> Iterator[Problem]:
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
    if (value == "remote") != (m.backend == "remote") and (m.backend or value == "remote"):
        text = f"model '{m.name}' has execution \"{value}\" and backend '{m.backend}'"
        if value == "remote" or (m.backend == "remote" and value not in ("", "auto", "thread")):
            yield s.problem("M13", path, text, 'a model on another server has execution "remote" and no other backend')
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
    """An ensemble has steps, and no fields that belong into the models of its steps."""
    m = s.message
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
    if m.HasField(SCHEDULING) and not m.ensemble_scheduling.step:
        yield s.problem("M83", SCHEDULING, f"must specify 'step' for ensemble '{m.name}'")


def ensemble_steps(s: RuleInput) -> Iterator[Problem]:
    """A step names its model, its tensors, the tests of its rows and the tensors that are divided into items."""
    for index, step in enumerate(s.message.ensemble_scheduling.step):
        path, where = f"{SCHEDULING}.step[{index}]", f"in step {index} of ensemble '{s.message.name}'"
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
        if step.name and (not step.name.isprintable() or not step.name.strip() or set("/#") & set(step.name)):
            text = f"{step.name!r} {where} is no name of a step"
            hint = "it is printable and without / and #, which are between nested names and before numbers"
            yield s.problem("M89", f"{path}.name", text, hint)
        for number, test in enumerate(step.when):
            if text := _wrong_test(test):
                yield s.problem("M86", f"{path}.when[{number}]", f"when: {text} {where}", TEST_FORMS)
        if step.HasField("each") and not (step.each.tensor and all(step.each.tensor)):
            yield s.problem("M87", f"{path}.each", f"each: must specify 'tensor' {where}", "the tensors to take apart")


def ensemble_fills(s: RuleInput) -> Iterator[Problem]:
    """A tensor is filled once, and a BOOL tensor that says which of its rows are present belongs to one fill."""
    m = s.message
    fills = m.ensemble_scheduling.fill
    seen: set[str] = set()
    flags: set[str] = set()
    filled = {fill.tensor for fill in fills}
    for index, fill in enumerate(fills):
        path = f"{SCHEDULING}.fill[{index}]"
        if not fill.tensor:
            yield s.problem("M88", path, f"fill: must specify 'tensor' in ensemble '{m.name}'")
        elif fill.tensor in seen:
            yield s.problem("M88", path, f"tensor '{fill.tensor}' of ensemble '{m.name}' is filled twice")
        elif fill.present and (fill.present in filled or fill.present in flags):
            what = "is filled itself" if fill.present in filled else "is named by another fill"
            text = f"fill: 'present' of '{fill.tensor}' names '{fill.present}', which {what}, in ensemble '{m.name}'"
            yield s.problem("M88", f"{path}.present", text, "a name of its own: of a BOOL tensor that no step writes")
        seen.add(fill.tensor)
        flags.add(fill.present)


TEST_FORMS: Final = (
    'a test is `when { tensor: "T" }` for a BOOL tensor, `above`, `below` or both, `equals`, or `otherwise: true`'
)


def _wrong_test(test: pb.ModelEnsembling.Test) -> str:
    """Why a test cannot be understood, "" if it can."""
    compares = test.HasField("above") or test.HasField("below")
    if not test.tensor:
        return "must specify 'tensor'"
    if compares + bool(test.equals) + test.otherwise > 1:
        return f"the test of '{test.tensor}' must be one of a comparison, 'equals' and 'otherwise'"
    if test.otherwise and getattr(test, "not"):
        return f"the test of '{test.tensor}' cannot be both 'not' and 'otherwise'"
    if (test.HasField("above") and test.above != test.above) or (test.HasField("below") and test.below != test.below):
        return f"the test of '{test.tensor}' compares with NaN, which no number passes"
    return ""


# ---------------------------------------------------------------------------------------------- tensors

TENSORRT_PLATFORM: Final = "tensorrt_plan"
FORMATS: Final = (pb.ModelInput.FORMAT_NHWC, pb.ModelInput.FORMAT_NCHW)
A_DIMENSION: Final = "must be integer >= 1, or -1 to indicate a variable-size dimension"


def declarations(s: RuleInput) -> Iterator[Problem]:
    """Every tensor has a name, a data type and dims."""
    model = s.message.name
    for path, text, tensor in s.tensors():
        if not tensor.name:
            yield s.problem("M20", path, f"model {path.partition('[')[0]} must specify 'name' for {model}")
        if tensor.data_type == pb.TYPE_INVALID:
            yield s.problem("M21", path, f"model {text} must specify 'data_type' for {model}")
        if not tensor.dims:
            hint = "a batch of single values has dims: [ 1 ]" if s.message.max_batch_size > 0 else ""
            yield s.problem("M22", path, f"model {text} must specify 'dims' for {model}", hint)
        sizes = [("M23", "dims", dim, "dimension") for dim in enumerate(tensor.dims)]
        sizes += [("M24", "reshape.shape", dim, "reshape dimensions") for dim in enumerate(tensor.reshape.shape)]
        for rule, field, (index, dim), what in sizes:
            if dim < 1 and dim != -1:
                problem = f"model {text} {what} {A_DIMENSION} for {model}"
                yield s.problem(rule, f"{path}.{field}[{index}]", problem, f"found {dim}")
    for index, given in enumerate(s.message.input):
        if given.format in FORMATS and len(given.dims) != 3:
            problem = f"model input NHWC/NCHW require 3 dims for {model}"
            yield s.problem("M28", f"input[{index}].format", problem, f"'{given.name}' has {len(given.dims)}")


def reshapes(s: RuleInput) -> Iterator[Problem]:
    """A reshape keeps the element count; between two varying dimensions, both sides have the same number of them."""
    model = s.message.name
    for path, text, tensor in s.tensors():
        if not tensor.HasField("reshape"):
            continue
        dims, shape, where = [*tensor.dims], [*tensor.reshape.shape], f"{path}.reshape"
        if not shape and s.message.max_batch_size == 0:
            problem = f"model {text} cannot have empty reshape for non-batching model as scalar tensors are not"
            yield s.problem("M25", where, f"{problem} supported for {model}")
        if not all(dim >= 1 or dim == -1 for dim in (*dims, *shape)):
            continue
        differs, hint = f"model {text} has different size for dims and reshape for {model}", f"{dims} to {shape}"
        if -1 in dims and -1 in shape:
            ours, theirs = _runs(dims), _runs(shape)
            if len(ours) != len(theirs):
                problem = f"model {text} has different number of variable-size dimensions for dims and reshape"
                yield s.problem("M27", where, f"{problem} for {model}", hint)
            elif ours != theirs:
                yield s.problem("M27", where, differs, hint)
        elif -1 in dims or -1 in shape or prod(dims) != prod(shape):
            yield s.problem("M26", where, differs, hint)


def _runs(dims: Sequence[int]) -> list[int]:
    """The element counts before, between and after the varying dimensions: [2, 4, -1, 6] gives [8, 6]."""
    runs = [1]
    for dim in dims:
        if dim == -1:
            runs.append(1)
        else:
            runs[-1] *= dim
    return runs


def tensorrt_tensors(s: RuleInput) -> Iterator[Problem]:
    """Shape tensors and non-linear formats are for TensorRT."""
    model, is_tensorrt = s.message.name, s.message.platform == TENSORRT_PLATFORM
    for path, text, tensor in s.tensors():
        where, hint = f"{path}.is_non_linear_format_io", f"model {text}"
        if tensor.is_shape_tensor and not is_tensorrt:
            problem = f"shape tensors are only supported for TensorRT platform for {model}"
            yield s.problem("M29", f"{path}.is_shape_tensor", problem, hint)
        if tensor.is_non_linear_format_io and not is_tensorrt:
            problem = f"Non-linear IO format is only supported for the TensorRT platform for {model}"
            yield s.problem("M30", where, problem, hint)
        elif tensor.is_non_linear_format_io and len(tensor.dims) != 3:
            problem = f"Non-linear IO format {path.partition('[')[0]} requires 3 dims for {model}"
            yield s.problem("M30", where, problem, hint)


def unique_names(s: RuleInput) -> Iterator[Problem]:
    """An input is listed once: a request cannot have two of one name. An output listed again is a warning
    (`unsupported`), but its labels are in one file.
    """
    names = [tensor.name for tensor in s.message.input]
    for index, name in enumerate(names):
        if name and name in names[:index]:
            first = s.source.place(f"input[{names.index(name)}]")
            text = f"input '{name}' is specified more than once for {s.message.name}"
            yield s.problem("M31", f"input[{index}].name", text, f"the first is at {first}")
    labelled: dict[str, str] = {}
    for index, tensor in enumerate(s.message.output):
        if tensor.name and tensor.label_filename:
            path = f"output[{index}].label_filename"
            first_path = labelled.setdefault(tensor.name, path)
            if first_path != path:
                text = f"multiple label files for '{tensor.name}'"
                yield s.problem("M32", path, text, f"the first is at {s.source.place(first_path)}")


def model_outputs(s: RuleInput) -> Iterator[Problem]:
    model = s.message.name
    # Without a backend, completion was not possible. A Python model may have no outputs, as on Triton.
    if not s.message.output and (s.message.backend not in ("", "python") or s.is_ensemble):
        has_only_text = s.is_ensemble or s.is_strict
        hint = "list them in config.pbtxt" + ("" if has_only_text else ", or let the model's own file say them")
        yield s.problem("M33", "", f"model '{model}' must specify at least one 'output'", hint)
    for index, tensor in enumerate(s.message.output):
        if file := tensor.label_filename:
            path, text = f"output[{index}].label_filename", f"label file '{file}' of output '{tensor.name}'"
            if why := s.path_error(file):
                yield s.problem("M34", path, f"{text} {why} for {model}")
            elif not (s.folder / file).is_file():
                hint = "its path starts at the model's folder"
                yield s.problem("M34", path, f"{text} does not exist for {model}", hint)


def batch_inputs(s: RuleInput) -> Iterator[Problem]:
    model, inputs = s.message.name, [tensor.name for tensor in s.message.input]
    seen: set[str] = set()
    for index, tensor in enumerate(s.message.batch_input):
        path = f"batch_input[{index}]"
        yield from _sources_exist(s, "M35", path, tensor.Kind.Name(tensor.kind), tensor.source_input)
        if tensor.data_type not in (pb.TYPE_INT32, pb.TYPE_FP32):
            text = f"batch input data type must be TYPE_INT32 or TYPE_FP32 for {model}"
            yield s.problem("M36", f"{path}.data_type" if tensor.data_type else path, text)
        if not tensor.target_name:
            yield s.problem("M38", path, f"batch input must specify 'target_name' for {model}")
        for position, target in enumerate(tensor.target_name):
            where = f"{path}.target_name[{position}]"
            if target in inputs:
                text = f"target input name '{target}' is an input that clients send, too, for {model}"
                yield s.problem("M41", where, text, "leave it out of `input`: a batch input is made by the server")
            elif target in seen:
                yield s.problem("M41", where, f"target input name '{target}' can only be specified once for {model}")
            seen.add(target)


def batch_outputs(s: RuleInput) -> Iterator[Problem]:
    model = s.message.name
    inputs = {tensor.name: tensor for tensor in s.message.input}
    outputs = {tensor.name: tensor for tensor in s.message.output}
    seen: set[str] = set()
    for index, tensor in enumerate(s.message.batch_output):
        path = f"batch_output[{index}]"
        yield from _sources_exist(s, "M39", path, tensor.Kind.Name(tensor.kind), tensor.source_input)
        source = inputs.get(tensor.source_input[0]) if len(tensor.source_input) == 1 else None
        for position, target in enumerate(tensor.target_name):
            where = f"{path}.target_name[{position}]"
            if target not in outputs:
                text = f"unknown target output name '{target}' for {model}"
                yield s.problem("M40", where, text, did_you_mean(target, outputs))
                continue
            if target in seen:
                yield s.problem("M40", where, f"target output name '{target}' can only be specified once for {model}")
            seen.add(target)
            yield from _shape_is_known(s, where, outputs[target], source)


def _sources_exist(s: RuleInput, rule: str, path: str, kind: str, sources: Sequence[str]) -> Iterator[Problem]:
    """A batch input or output has one source, and every source is an input."""
    if len(sources) != 1:
        text = f"{path.partition('[')[0].replace('_', ' ')} kind '{kind}' expects 1 source input, got {len(sources)}"
        yield s.problem(rule, path, f"{text} for {s.message.name}")
    names = [tensor.name for tensor in s.message.input]
    for index, source in enumerate(sources):
        if source not in names:
            text = f"unknown source input name '{source}' for {s.message.name}"
            yield s.problem("M37", f"{path}.source_input[{index}]", text, did_you_mean(source, names))


def _shape_is_known(s: RuleInput, path: str, target: pb.ModelOutput, source: pb.ModelInput | None) -> Iterator[Problem]:
    """The varying dimensions of a batch output are those of its source."""
    if target.HasField("reshape"):
        text = f"target output name '{target.name}' has a reshape for {s.message.name}"
        yield s.problem("M42", path, text, "write the shape that clients get as its dims")
    elif source is not None:
        dims = source.reshape.shape if source.HasField("reshape") else source.dims
        if -1 in target.dims[len(dims) :]:
            text = f"target output name '{target.name}' varies where input '{source.name}' has no dimension"
            ours, theirs = (shape_text(each) for each in (target.dims, dims))
            yield s.problem("M42", path, f"{text} for {s.message.name}", f"dims {ours} take their -1s from {theirs}")


def warmup(s: RuleInput) -> Iterator[Problem]:
    m = s.message
    most = max(m.max_batch_size, 1)
    known = {given.name: given for given in (*m.input, *_sequence_inputs(s))}
    for index, sample in enumerate(m.model_warmup):
        for name in sorted(sample.inputs):
            given, path = sample.inputs[name], f"model_warmup[{index}].inputs[{name}]"
            file, dims = given.input_data_file, [*given.dims]
            if any(dim < 0 for dim in dims):
                text = f"warmup setting expects all variable-size dimensions are specified for input '{name}'"
                yield s.problem("M55", f"{path}.dims", f"{text} for {m.name}")
            if given.WhichOneof("input_data_type") is None:
                text = f"warmup setting expects input '{name}' to have input_data_type set for {m.name}"
                yield s.problem("M55", path, text, "write zero_data: true, random_data: true or input_data_file")
            if file:
                text, where = f"warmup file '{file}' of input '{name}'", f"{path}.input_data_file"
                if why := s.path_error("warmup", file):
                    yield s.problem("M56", where, f"{text} {why} for {m.name}")
                elif not (s.folder / "warmup" / file).is_file():
                    yield s.problem(
                        "M56", where, f"{text} does not exist for {m.name}", f"put it into {s.folder.name}/warmup/"
                    )
            if name in known:
                yield from _sample_fits(s, path, known[name], given.data_type, dims)
            elif m.input:  # if none is listed, completion was not possible
                text = f"warmup input '{name}' is not an input of model {m.name}"
                yield s.problem("M57", path, text, did_you_mean(name, known) or f"it has {', '.join(known)}")
        if sample.batch_size > most:
            text = f"warmup sample '{sample.name}' of model {m.name} has batch_size {sample.batch_size}"
            yield s.problem("M58", f"model_warmup[{index}].batch_size", text, f"at most {most} requests run at once")


def _sequence_inputs(s: RuleInput) -> Iterator[pb.ModelInput]:
    """The control and state inputs of a sequence model, which it has besides those it lists."""
    for tensor in s.message.sequence_batching.control_input:
        for control in tensor.control[:1]:
            if control.int32_false_true:
                data_type = pb.TYPE_INT32
            else:
                data_type = pb.TYPE_FP32 if control.fp32_false_true else control.data_type or pb.TYPE_BOOL
            yield pb.ModelInput(name=tensor.name, data_type=data_type, dims=[1])
    for state in s.message.sequence_batching.state:
        yield pb.ModelInput(name=state.input_name, data_type=state.data_type, dims=state.dims)


def _sample_fits(
    s: RuleInput, path: str, declared: pb.ModelInput, data_type: int, dims: list[int]
) -> Iterator[Problem]:
    what = f"warmup input '{declared.name}' of model {s.message.name}"
    if data_type != declared.data_type:
        found, wanted = (pb.DataType.Name(number) for number in (data_type, declared.data_type))
        yield s.problem("M57", f"{path}.data_type", f"{what} has data_type {found}", f"the input is {wanted}")
    wanted_dims = [*declared.dims]
    is_alike = len(dims) == len(wanted_dims) and all(w in (-1, d) for w, d in zip(wanted_dims, dims, strict=True))
    if not is_alike and all(dim >= 0 for dim in dims):
        hint = f"the input's are {wanted_dims}, without the batch dimension"
        yield s.problem("M57", f"{path}.dims", f"{what} has dims {dims}", hint)


# ---------------------------------------------------------------------------------------------- batching

BATCHING: Final = "dynamic_batching"
SEQUENCES: Final = "sequence_batching"
LISTS: Final = ("int32_false_true", "fp32_false_true", "bool_false_true")
ID_TYPES: Final = (pb.TYPE_UINT64, pb.TYPE_INT64, pb.TYPE_UINT32, pb.TYPE_INT32, pb.TYPE_STRING)
_Control = pb.ModelSequenceBatching.Control
_State = pb.ModelSequenceBatching.State


def preferred_sizes(s: RuleInput) -> Iterator[Problem]:
    """Preferred batch sizes are positive and no larger than a batch may be."""
    model, most = s.message.name, s.message.max_batch_size
    dynamic, oldest = s.message.dynamic_batching, s.message.sequence_batching.oldest
    for rule, path, sizes, subject in (
        ("M50", BATCHING, dynamic.preferred_batch_size, "dynamic batching preferred size"),
        ("M65", f"{SEQUENCES}.oldest", oldest.preferred_batch_size, "sequence batching preferred batch size"),
    ):
        for index, size in enumerate(sizes):
            where = f"{path}.preferred_batch_size[{index}]"
            if size <= 0:
                yield s.problem(rule, where, f"{subject} must be positive for {model}", f"found {size}")
            elif 0 <= most < size:
                text = f"{subject} must be <= max batch size for {model}"
                yield s.problem(rule, where, text, f"{size} is more than {most}")


def priorities(s: RuleInput) -> Iterator[Problem]:
    batching, model = s.message.dynamic_batching, s.message.name
    levels, default = batching.priority_levels, batching.default_priority_level
    if levels and not 1 <= default <= levels:
        path = f"{BATCHING}.default_priority_level" if default else f"{BATCHING}.priority_levels"
        yield s.problem("M51", path, f"default priority level must be in range [1, {levels}] for {model}")
    policies = [(f"{BATCHING}.default_queue_policy", batching.default_queue_policy)]
    for level in sorted(batching.priority_queue_policy):
        path = f"{BATCHING}.priority_queue_policy[{level}]"
        policies.append((path, batching.priority_queue_policy[level]))
        if levels and not 1 <= level <= levels:
            text = f"priority queue policy must have priority level in range [1, {levels}] for {model}"
            yield s.problem("M52", path, text, f"found {level}")
    if not batching.preserve_ordering:
        return
    if levels > 1:
        text = f"Only one priority level is allowed when 'preserve_ordering' is true for {model}"
        yield s.problem("M53", f"{BATCHING}.priority_levels", text)
    for path, policy in policies:
        if policy.default_timeout_microseconds and policy.timeout_action == pb.ModelQueuePolicy.DELAY:
            text = f"Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for {model}"
            yield s.problem("M54", path, text)


def control_tensors(s: RuleInput) -> Iterator[Problem]:
    model = s.message.name
    names: set[str] = set()
    kinds: set[str] = set()
    for index, tensor in enumerate(s.message.sequence_batching.control_input):
        path = f"{SEQUENCES}.control_input[{index}]"
        if not tensor.name:
            yield s.problem("M60", path, f"sequence batching control tensor must have a name for {model}")
        elif tensor.name in names:
            text = f"sequence batching control tensor '{tensor.name}' is specified for multiple control kinds"
            yield s.problem("M61", f"{path}.name", f"{text} for {model}")
        names.add(tensor.name)
        for position, control in enumerate(tensor.control):
            where, kind = f"{path}.control[{position}]", _Control.Kind.Name(control.kind)
            if kind in kinds:
                yield s.problem("M62", where, f"sequence batching specifies multiple {kind} tensors for {model}")
            kinds.add(kind)
            is_id = control.kind == _Control.CONTROL_SEQUENCE_CORRID
            yield from (_id_control if is_id else _boolean_control)(s, where, kind, control)


def _boolean_control(s: RuleInput, path: str, kind: str, control: _Control) -> Iterator[Problem]:
    """It has one pair of values for false and true."""
    end = f"for {kind} for {s.message.name}"
    given = [name for name in LISTS if len(getattr(control, name))]
    if not given:
        either = "either 'int32_false_true', 'fp32_false_true' or 'bool_false_true'"
        yield s.problem("M63", path, f"sequence batching must specify {either} {end}")
    elif len(given) > 1:
        text = "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and"
        yield s.problem("M63", path, f"{text} 'bool_false_true' {end}")
    elif len(getattr(control, given[0])) != 2:
        text = f"sequence batching control '{given[0]}' must have exactly 2 entries {end}"
        yield s.problem("M63", f"{path}.{given[0]}", text)


def _id_control(s: RuleInput, path: str, kind: str, control: _Control) -> Iterator[Problem]:
    if any(len(getattr(control, name)) for name in LISTS):
        text = "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or"
        yield s.problem("M64", path, f"{text} 'bool_false_true' for {kind} for {s.message.name}")
    if control.data_type not in ID_TYPES:
        text = f"unexpected data type for control {kind} for {s.message.name}. Allowed data types are"
        yield s.problem("M64", path, f"{text} TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING")


def slot_utilization(s: RuleInput) -> Iterator[Problem]:
    share = s.message.sequence_batching.direct.minimum_slot_utilization
    if not 0.0 <= share <= 1.0:
        text = f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {s.message.name}"
        yield s.problem("M66", f"{SEQUENCES}.direct.minimum_slot_utilization", text, f"found {share:g}")


def server_inputs(s: RuleInput) -> Iterator[Problem]:
    """Clients cannot send inputs that the server computes."""
    batching = s.message.sequence_batching
    listed = {tensor.name for tensor in s.message.input}
    taken: set[str] = set()
    made = [(f"control_input[{n}].name", "control input", one.name) for n, one in enumerate(batching.control_input)]
    made += [(f"state[{n}].input_name", "state input", one.input_name) for n, one in enumerate(batching.state)]
    for path, kind, name in made:
        text = f"sequence batching {kind} '{name}'"
        if name in listed:
            yield s.problem("M74", f"{SEQUENCES}.{path}", f"{text} must not be listed as input for {s.message.name}")
        elif name in taken and kind == "state input":
            yield s.problem("M74", f"{SEQUENCES}.{path}", f"{text} is specified twice for {s.message.name}")
        taken.add(name)


def states(s: RuleInput) -> Iterator[Problem]:
    for index, state in enumerate(s.message.sequence_batching.state):
        path = f"{SEQUENCES}.state[{index}]"
        if state.initial_state:
            yield from _initial_state(s, f"{path}.initial_state", state)
        if state.use_growable_memory and not state.use_same_buffer_for_input_output:
            text = "In order to 'use_growable_memory', you must also enable 'use_same_buffer_for_input_output'"
            yield s.problem("M73", f"{path}.use_growable_memory", f"{text} for state input '{state.input_name}'")
        for field in ("input_name", "output_name", "data_type", "dims"):
            if not getattr(state, field):
                yield s.problem("M75", path, f"sequence batching state must have {field} for {s.message.name}")


def _initial_state(s: RuleInput, path: str, state: _State) -> Iterator[Problem]:
    name, initial, where = state.input_name, state.initial_state[0], f"{path}[0]"
    if len(state.initial_state) > 1:
        text = f"initial_state field for state input '{name}' must contain exactly one or zero element."
        yield s.problem("M67", f"{path}[1]", f"{text} Found '{len(state.initial_state)}' elements.")
    if initial.data_type != state.data_type:
        text = f"The data type used for 'initial_state' field of state '{name}' does not match"
        yield s.problem("M68", where, f"{text} the state data type.")
    if not initial.name:
        yield s.problem("M69", where, f"Field 'name' must be set when using initial_state for state input '{name}'.")
    if len(initial.dims) != len(state.dims):
        text = "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state"
        yield s.problem("M70", f"{where}.dims", f"{text} input '{name}'. {len(initial.dims)} != {len(state.dims)}")
    else:
        for index, (one, other) in enumerate(zip(initial.dims, state.dims, strict=True)):
            if one < 0:
                text = f"'initial_state' field for state input name '{name}' contains variable dimensions."
                yield s.problem("M70", f"{where}.dims[{index}]", text)
            elif other != -1 and one != other:
                text = f"'initial_state' dim for input name '{name}' doesn't match 'state' dim description."
                yield s.problem("M70", f"{where}.dims[{index}]", f"{text} {one} != {other}")
    if initial.WhichOneof("state_data") is None:
        text = f"initial_state setting expects state'{name}' to have state_data set"
        hint = "write zero_data: true, or data_file with the name of a file in initial_state/"
        yield s.problem("M71", where, text, hint)
    if initial.data_file and (why := s.path_error("initial_state", initial.data_file)):
        text = f"initial_state file '{initial.data_file}' of state input '{name}' {why}"
        yield s.problem("M72", f"{where}.data_file", text)


RULES: Final[Sequence[Rule]] = (
    name,
    backend_is_known,
    platform_fits_backend,
    batch_size_and_versions,
    instance_groups,
    execution,
    other_parameters,
    model_files,
    metrics,
    response_cache,
    ensemble,
    ensemble_steps,
    ensemble_fills,
    declarations,
    reshapes,
    tensorrt_tensors,
    unique_names,
    model_outputs,
    batch_inputs,
    batch_outputs,
    warmup,
    preferred_sizes,
    priorities,
    control_tensors,
    slot_utilization,
    server_inputs,
    states,
)
