"""Options of `flowserve run`: their declarations, checks of options together, and the options of each part from them.

Decides names (tritonserver's if it has the option), safe defaults and limits. The default addresses are local only,
and HTTP's restrictions of API groups apply to gRPC too. docs/command-line.md lists the options without a counterpart in
tritonserver. Of tritonserver's options that flowserve does not implement, decides which are refused, with the name of
the missing feature; which exist under another name; which are accepted because they request the existing behaviour, or
tune a part that flowserve does not have. Does not know the effect of an option. Callers: `main`, `run`, `listen`;
`authoring` for its defaults.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flowserve.cli.option_values import (
    METRICS_QUANTILES,
    ONNXRUNTIME_SETTINGS,
    ONNXRUNTIME_UNUSED,
    TraceSetting,
    add_option,
    add_switch,
    backend_setting,
    boolean,
    file_stem,
    gpu_pool,
    hosts,
    local_cache,
    metrics_setting,
    one_of,
    origins,
    pattern,
    resource,
    restriction,
    trace_setting,
    verbosity,
    whole_number,
    workers,
)
from flowserve.cli.stores import add_store_options, repository
from flowserve.cli.wings import WINGS, contradiction_of_wings
from flowserve.grpc.options import KEY_PREFIX, MESSAGE_BYTES, MESSAGE_BYTES_MAX, GrpcOptions
from flowserve.memory.capacity import memory_bytes, open_files
from flowserve.observe.settings import FORMATS, LogChoice, MetricsChoice
from flowserve.observe.trace_settings import API_MAX_BYTES, LEVELS, OFF, OPENTELEMETRY, TRITON, TraceChoice
from flowserve.runtime.budget import Budget
from flowserve.version import SERVER_NAME

if TYPE_CHECKING:
    from flowserve.repository.mirror.storage import StoreUrl
    from flowserve.runtime.protocol import Restriction

Certificate = tuple[Path, Path, Path | None]  # certificate, key, and the authority for clients' certificates

LOCALHOST: Final = "127.0.0.1"
MEBIBYTE: Final = 1 << 20
DEFAULT_GRPC_PORT: Final = 8001
DEFAULT_METRICS_PORT: Final = 8002
BODIES_OF_A_REQUEST: Final = 2  # that count at once: the compressed one and the expanded one
CONNECTION_BYTES: Final = 512 * 1024  # of the machine's memory for each connection
QUANTILES: Final = (0.5, 0.9, 0.95, 0.99, 0.999)
# Options passed to grpcio: its name for the option, tritonserver's default, the help text.
_CHANNEL: Final[Mapping[str, tuple[str, int, str]]] = {
    "--grpc-keepalive-time": ("grpc.keepalive_time_ms", 7_200_000, "milliseconds between pings to a silent client"),
    "--grpc-keepalive-timeout": ("grpc.keepalive_timeout_ms", 20_000, "milliseconds a ping may stay unanswered"),
    "--grpc-http2-max-pings-without-data": ("grpc.http2.max_pings_without_data", 2, "pings in a row; 0: any number"),
    "--grpc-http2-min-recv-ping-interval-without-data": (
        "grpc.http2.min_ping_interval_without_data_ms",
        300_000,
        "minimum milliseconds between a client's pings",
    ),
    "--grpc-http2-max-ping-strikes": ("grpc.http2.max_ping_strikes", 2, "pings that come too early; 0: any number"),
    "--grpc-max-connection-age": (
        "grpc.max_connection_age_ms",
        0,
        "maximum age of a connection in milliseconds; 0: no limit",
    ),
    "--grpc-max-connection-age-grace": (
        "grpc.max_connection_age_grace_ms",
        0,
        "milliseconds for its calls to finish then; 0: no limit",
    ),
}
_PERMIT_WITHOUT_CALLS: Final = "grpc.keepalive_permit_without_calls"
# grpcio selects one of the client's algorithms by this level and compresses every response with it.
_COMPRESSION: Final = "grpc.default_compression_level"
_COMPRESSION_LEVELS: Final = ("none", "low", "medium", "high")
_NO_LIMIT: Final = frozenset({"grpc.max_connection_age_ms", "grpc.max_connection_age_grace_ms"})


_SAGEMAKER: Final = "SageMaker's endpoints are"
_VERTEX_AI: Final = "Vertex AI's endpoints are"
_SHARED_PORT: Final = "sharing a port between servers is"

# Options whose feature is missing, each as a phrase with its verb: the message names the feature, which helps more than
# "unknown option".
NOT_YET: Final[Mapping[str, str]] = {
    "--sagemaker-port": _SAGEMAKER,
    "--sagemaker-safe-port-range": _SAGEMAKER,
    "--sagemaker-thread-count": _SAGEMAKER,
    "--vertex-ai-default-model": _VERTEX_AI,
    "--vertex-ai-port": _VERTEX_AI,
    "--vertex-ai-thread-count": _VERTEX_AI,
}

# The message for options that exist under another name.
INSTEAD: Final[Mapping[str, str]] = {
    "--port": "the option is --http-port",
    "--host": "the option is --http-address",
}

# Switches that are accepted with the given value, the existing behaviour, and refused with the other value.
AGREED: Final[Mapping[str, tuple[bool, str]]] = {
    "--allow-http": (True, "serving without HTTP is"),
    "--allow-sagemaker": (False, _SAGEMAKER),
    "--allow-vertex-ai": (False, _VERTEX_AI),
    "--model-namespacing": (False, "model namespacing is"),
    "--reuse-grpc-port": (False, _SHARED_PORT),
    "--reuse-http-port": (False, _SHARED_PORT),
}

# What to do in place of a missing feature.
_REMEDIES: Final[Mapping[str, str]] = {
    _SAGEMAKER: (
        "a proxy in the container can pass its GET /ping to /v2/health/ready and POST /invocations to "
        "/v2/models/MODEL/infer"
    ),
    _VERTEX_AI: (
        "upload the container with the health route /v2/health/ready, the predict route /v2/models/MODEL/infer and "
        "the port of --http-port"
    ),
    _SHARED_PORT: "--workers N starts several servers behind one port",
    "serving without HTTP is": "--http-address unix:PATH keeps it off the network",
    "model namespacing is": "give the models of different repositories different names",
}

# Options that do not affect results. They are accepted with a warning.
WITHOUT_EFFECT: Final[Mapping[str, str]] = {
    "--backend-directory": "backends are built in, or Python packages with an entry point",
    "--buffer-manager-thread-count": "what has to be copied is copied where it is used",
    "--cache-directory": "the local cache is built in",
    "--cuda-virtual-address-size": "the memory of implicit states is not reserved",
    "--enable-peer-access": "GPUs do not read each other's memory",
    "--grpc-infer-allocation-pool-size": "gRPC messages are not kept",
    "--grpc-infer-thread-count": "one thread serves all gRPC connections",
    "--grpc-max-response-pool-size": "gRPC messages are not kept",
    "--host-policy": "processes and memory are placed by the system",
    "--http-thread-count": "one event loop serves all HTTP connections",
    "--min-supported-compute-capability": "CUDA_VISIBLE_DEVICES chooses the GPUs",
    "--model-load-gpu-limit": "a load is not refused before a GPU's memory is full",
    "--model-load-thread-count": "how many models load at once is not chosen",
    "--repoagent-directory": "models with repository agents are refused",
}
_COUNTS: Final = frozenset(name for name in WITHOUT_EFFECT if name.endswith(("-count", "-pool-size")))

# tritonserver's older spellings of settings of --trace-config.
_TRACE_SPELLINGS: Final[Mapping[str, str]] = {
    "--trace-file": "triton,file",
    "--trace-level": "level",
    "--trace-rate": "rate",
    "--trace-count": "count",
    "--trace-log-frequency": "triton,log-frequency",
}

# Built-in backends without settings for --backend-config. Backends not listed here, except onnxruntime, are plug-ins.
_WITHOUT_SETTINGS: Final = ("callable", "python", "tensorrt")


# Declarations


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all options. The repository is optional for argparse, so that a misspelt option is reported first."""
    text = "the model repository, a folder of model folders, or a URL such as s3://BUCKET/FOLDER; several are one"
    add_repositories(parser, text)
    # Set by `main`: the repositories that are URLs, the command line, and which of several servers this process is.
    parser.set_defaults(mirrors=(), words=(), replica="")
    _add_http_arguments(parser.add_argument_group("where it listens"))
    _add_grpc_arguments(parser.add_argument_group("gRPC"))
    _add_metrics_arguments(parser.add_argument_group("metrics"))
    _add_model_arguments(parser.add_argument_group("how models are loaded and run"))
    add_store_options(parser.add_argument_group("repositories in stores"))
    for wing in WINGS:
        wing.add_options(parser.add_argument_group(wing.title))
    _add_gpu_arguments(parser.add_argument_group("GPUs"))
    _add_process_arguments(parser.add_argument_group("how it logs, traces and ends"))
    _add_older_spellings(parser)
    _add_arguments_without_effect(parser)


def add_repositories(parser: argparse._ActionsContainer, text: str) -> None:
    """Add REPO, and tritonserver's spellings of it; `named_repositories` combines them."""
    parser.add_argument("repositories", metavar="REPO", nargs="*", type=repository, help=text)
    spellings = ("--model-repository", "--model-store")
    text = "the same as REPO; repeatable"
    parser.add_argument(
        *spellings, dest="model_repository", metavar="REPO", action="append", default=[], type=repository, help=text
    )


def named_repositories(arguments: argparse.Namespace) -> list[Path | StoreUrl]:
    """The repositories of a command line in all spellings, each once."""
    return [*dict.fromkeys([*arguments.repositories, *arguments.model_repository])]


def add_quiet(parser: argparse._ActionsContainer) -> None:
    """Add -q, an option of every command."""
    text = "only results, addresses, warnings and errors: no progress, no table, no informational log records"
    parser.add_argument("-q", "--quiet", action="store_true", help=text)


def _add_http_arguments(group: argparse._ArgumentGroup) -> None:
    text = "default %(default)s: this machine only; 0.0.0.0 for all; unix:PATH for a socket in the file system"
    add_option(group, "--http-address ADDRESS", text, default=LOCALHOST)
    text = "default %(default)s; 0 picks a free one and prints it"
    add_option(group, "--http-port PORT", text, whole_number(0, 65535), 8000)
    text = "largest request body, after decompression; default %(default)s"
    add_option(group, "--http-max-input-size BYTES", text, whole_number(1), 64 * MEBIBYTE)
    text = (
        "request bodies and gRPC messages in the server at once, expanded ones included; default: an eighth of the "
        "memory, and at least twice --http-max-input-size"
    )
    add_option(group, "--http-max-total-input-size BYTES", text, whole_number(1))
    text = "connections at once; default: one for each 512 KiB of memory, and at most three quarters of the open files"
    add_option(group, "--http-max-connections N", text, whole_number(1))
    text = "most elements of a request's inputs, and of its outputs, in JSON; default %(default)s"
    add_option(group, "--http-max-json-elements N", text, whole_number(1), 16_777_216)
    text = "most BYTES elements of a request's inputs; default %(default)s"
    add_option(group, "--max-bytes-elements N", text, whole_number(1), 65_536)
    add_option(group, "--http-server-cert FILE", "serve HTTPS with this certificate (PEM)", Path)
    add_option(group, "--http-server-key FILE", "the certificate's key (PEM)", Path)
    add_option(group, "--http-root-cert FILE", "clients must have a certificate of this authority", Path)
    text = (
        "names of this server; requests with any other Host are refused, except to localhost and IP addresses; *.NAME"
        " and *; default: with an --http-address beyond this machine, names that cannot be registered; repeatable"
    )
    add_option(group, "--http-allowed-hosts HOST,...", text, hosts, repeatable=True)
    text = "web pages of these origins may send requests, and read the responses (CORS); * for any; repeatable"
    add_option(group, "--http-cors-origins ORIGIN,...", text, origins, repeatable=True)
    text = (
        "these groups of endpoints require this header: health, metadata, inference, shared-memory, "
        "model-config, model-repository, statistics, trace, logging; repeatable"
    )
    add_option(group, "--http-restricted-api GROUP,...:HEADER=VALUE", text, restriction, repeatable=True)
    text = "matching headers are passed to models as request parameters"
    add_option(group, "--http-header-forward-pattern REGEX", text, pattern)
    add_switch(group, "--allow-client-shm", False, "clients may register shared memory of this machine for tensors")


def _add_grpc_arguments(group: argparse._ArgumentGroup) -> None:
    add_switch(group, "--allow-grpc", True, "serve gRPC in addition to HTTP")
    text = "default %(default)s: this machine only; 0.0.0.0 for all; unix:PATH for a socket in the file system"
    add_option(group, "--grpc-address ADDRESS", text, default=LOCALHOST)
    text = f"default {DEFAULT_GRPC_PORT}, if it is free and grpcio is installed; 0 picks a free one and prints it"
    add_option(group, "--grpc-port PORT", text, whole_number(0, 65535))
    text = "largest message of a client, after decompression; default %(default)s"
    add_option(group, "--grpc-max-message-size BYTES", text, whole_number(1, MESSAGE_BYTES_MAX), MESSAGE_BYTES)
    text = "calls at once, streams included; default: no limit"
    add_option(group, "--grpc-max-calls N", text, whole_number(1))
    text = "none (default), low, medium or high: compression of responses for clients that accept it"
    add_option(
        group, "--grpc-infer-response-compression-level LEVEL", text, one_of(*_COMPRESSION_LEVELS), default="none"
    )
    add_switch(group, "--grpc-keepalive-permit-without-calls", False, "send pings also while no call is active")
    for option, (_, default, text) in _CHANNEL.items():
        add_option(group, f"{option} N", f"{text}; default {default}", whole_number(0, 2**31 - 1), default)
    add_option(group, "--grpc-use-ssl BOOL", "serve TLS; default false", boolean)
    text = "serve TLS, and clients must have a certificate of --grpc-root-cert"
    add_switch(group, "--grpc-use-ssl-mutual", False, text)
    add_option(group, "--grpc-server-cert FILE", "the server's certificate (PEM)", Path)
    add_option(group, "--grpc-server-key FILE", "the certificate's key (PEM)", Path)
    add_option(group, "--grpc-root-cert FILE", "the authority of clients' certificates", Path)
    text = (
        f"these groups of calls require the header {KEY_PREFIX}KEY; the groups are those of "
        "--http-restricted-api, whose restrictions hold here too; repeatable"
    )
    add_option(group, "--grpc-restricted-protocol GROUP,...:KEY=VALUE", text, restriction, repeatable=True)
    text = "matching headers are passed to models as request parameters"
    add_option(group, "--grpc-header-forward-pattern REGEX", text, pattern)


def _add_metrics_arguments(group: argparse._ArgumentGroup) -> None:
    add_switch(group, "--allow-metrics", True, "serve /metrics")
    add_switch(group, "--allow-cpu-metrics", True, "include CPU and memory metrics of the machine")
    add_switch(group, "--allow-gpu-metrics", True, "include GPU metrics, from NVIDIA's driver")
    text = (
        "also serve /metrics on a separate port; 0 picks a free one and prints it; default: none, "
        f"or {DEFAULT_METRICS_PORT} with --metrics-address"
    )
    add_option(group, "--metrics-port PORT", text, whole_number(0, 65535))
    add_option(group, "--metrics-address ADDRESS", "address of that port; default: HTTP's")
    text = "minimum period over which the machine's figures are averaged; default %(default)s"
    add_option(group, "--metrics-interval-ms MS", text, whole_number(1, 2**31 - 1), 2000)
    text = (
        "counter_latencies (default true), histogram_latencies (default true), summary_latencies (default false), "
        "summary_quantiles=0.5:0.05,0.9:0.01 (the number after the colon is accepted and ignored); repeatable"
    )
    add_option(group, "--metrics-config KEY=VALUE", text, metrics_setting, repeatable=True)


def _add_model_arguments(group: argparse._ArgumentGroup) -> None:
    add_switch(group, "--exit-on-error", True, "stop when a model fails to load at start")
    add_switch(group, "--strict-readiness", True, "the server is ready only while all models are")
    text = (
        "none (default): load everything at start, and nothing later; poll: follow changes in the repository; "
        "explicit: load what --load-model names, the rest when clients ask for it"
    )
    add_option(group, "--model-control-mode MODE", text, one_of("none", "poll", "explicit"), "none")
    text = "with --model-control-mode=explicit: load this at start; may be repeated; * alone loads everything"
    add_option(group, "--load-model NAME", text, repeatable=True)
    add_config_options(group)
    add_option(group, "--model-load-retry-count N", "repeat a failed load so often; default 0", whole_number(0), 0)
    text = "with --model-control-mode=poll: seconds between two scans of the repository; default %(default)s"
    add_option(group, "--repository-poll-secs SECONDS", text, whole_number(1), 15)
    text = (
        "off (default): instances run as soon as they are free; execution_count: they wait for their resources and"
        " their turn"
    )
    add_option(group, "--rate-limit MODE", text, one_of("off", "execution_count"), "off")
    text = (
        "the amount of a resource, on one device or on each; repeatable. Without this option, the"
        " largest amount that an instance requires; with it, resources that are not listed do not exist"
    )
    add_option(group, "--rate-limit-resource NAME:COUNT[:DEVICE]", text, resource, repeatable=True)
    text = (
        "a request is answered (504) when its timeout passes, even while it runs; models and ensembles may override it "
        "with their parameter answer_at_timeout"
    )
    add_switch(group, "--answer-at-timeout", False, text)
    text = (
        "an output of a Python model that has another data type or shape than configured, or is missing, is an error "
        "(500); otherwise it is passed on as it is, with a warning in the log"
    )
    add_switch(group, "--strict-outputs", False, text)
    text = "size of the response cache in bytes; it serves deployments whose configuration enables response_cache"
    add_option(group, "--cache-config local,size=BYTES", text, local_cache)
    text = (
        "where Python models run: process, one for each instance; thread; or inline on the event loop, for "
        "trusted models; default process on Linux, thread elsewhere"
    )
    add_option(group, "--python-execution PLACE", text, one_of("process", "thread", "inline"))
    text = (
        "a setting of a backend for all its models that do not set it themselves; onnxruntime has "
        f"{', '.join(ONNXRUNTIME_SETTINGS)}; repeatable"
    )
    add_option(group, "--backend-config BACKEND,KEY=VALUE", text, backend_setting, repeatable=True)


def add_config_options(parser: argparse._ActionsContainer) -> None:
    """Add the options of every command that reads configurations as the server does."""
    text = "use configs/NAME.pbtxt instead of config.pbtxt for models that have this file"
    add_option(parser, "--model-config-name NAME", text, file_stem)
    text = "models have exactly the configuration that is written; their own files and code complete nothing"
    parser.add_argument("--disable-auto-complete-config", action="store_true", help=text)
    parser.add_argument("--strict-model-config", type=boolean, default=False, help=argparse.SUPPRESS)


def is_strict(arguments: argparse.Namespace) -> bool:
    """Whether configurations are not completed. tritonserver's older spelling cannot take the newer one back."""
    return bool(arguments.disable_auto_complete_config or arguments.strict_model_config)


def _add_gpu_arguments(group: argparse._ArgumentGroup) -> None:
    text = "auto (default): the GPUs of this machine; off: models that ask for one run on the CPU"
    add_option(group, "--gpu auto|off", text, one_of("auto", "off"), "auto")
    text = "pinned host memory for copies to and from GPUs; default 256 MiB"
    add_option(group, "--pinned-memory-pool-byte-size BYTES", text, whole_number(0))
    text = "memory of a GPU for tensors between steps; default 1 GiB; repeatable"
    add_option(group, "--cuda-memory-pool-byte-size GPU:BYTES", text, gpu_pool, repeatable=True)


def _add_process_arguments(group: argparse._ArgumentGroup) -> None:
    text = "servers behind the port, each a process with all models; auto: one for each processor; default 1"
    add_option(group, "--workers N", text, workers, 1)
    text = "kill and restart one of several workers whose event loop has not answered for so long; 0: never; default 60"
    add_option(group, "--worker-timeout-secs SECONDS", text, whole_number(0), 60)
    text = "the server's name in its metadata; default %(default)s, which Triton's clients compare"
    add_option(group, "--id NAME", text, default=SERVER_NAME)
    text = "how long requests may take to finish after SIGTERM; default %(default)s"
    add_option(group, "--exit-timeout-secs SECONDS", text, whole_number(0), 30)
    text = "after a stop signal, not ready but still serving for so long, so that load balancers learn it; default 0"
    add_option(group, "--drain-delay-secs SECONDS", text, whole_number(0), 0)
    text = "0 (default) or false: what an operator needs; 1 and more, or true: details"
    add_option(group, "--log-verbose LEVEL", text, verbosity, 0)
    text = "default or ISO8601, which are formats of the time of a line; json: an object per line, with trace ids"
    add_option(group, "--log-format FORMAT", text, one_of(*FORMATS), "default")
    for what in ("info", "warning", "error"):
        add_switch(group, f"--log-{what}", True, f"log {what} lines")
    add_option(group, "--log-file PATH", "file to append the log to; default: standard error", default="")
    text = (
        "level=TIMESTAMPS, level=TENSORS, rate=N, count=N, mode=triton or mode=opentelemetry; triton,file=PATH, "
        "triton,log-frequency=N, triton,api-max-bytes=N; opentelemetry,url=URL, opentelemetry,resource=KEY=VALUE; "
        "repeatable"
    )
    add_option(group, "--trace-config SETTING", text, trace_setting, repeatable=True)


def _add_older_spellings(parser: argparse.ArgumentParser) -> None:
    """Add tritonserver's deprecated options, hidden from the help."""
    for name, setting in _TRACE_SPELLINGS.items():
        parse = partial(_older_trace_setting, setting)
        parser.add_argument(name, dest="trace_config", action="append", type=parse, help=argparse.SUPPRESS)
    name = "--response-cache-byte-size"
    parser.add_argument(name, dest="cache_config", type=_older_cache, help=argparse.SUPPRESS)


def _older_trace_setting(setting: str, value: str) -> TraceSetting:
    # Levels of before TENSORS: tritonserver takes both as TIMESTAMPS.
    is_old_level = setting == "level" and value in ("MIN", "MAX")
    return trace_setting(f"{setting}={'TIMESTAMPS' if is_old_level else value}")


def _older_cache(text: str) -> int | None:
    """0 is no cache."""
    return whole_number(0)(text) or None


def _add_arguments_without_effect(parser: argparse.ArgumentParser) -> None:
    """Add these options, hidden from the help."""
    for name, (value, feature) in AGREED.items():
        # A switch without a value means true.
        parser.add_argument(name, nargs="?", const="true", type=_agreed(value, feature), help=argparse.SUPPRESS)
    for name in WITHOUT_EFFECT:
        parser.add_argument(name, type=whole_number(0) if name in _COUNTS else str, help=argparse.SUPPRESS)


def _agreed(value: bool, feature: str) -> Callable[[str], bool]:
    words = ("true", "1") if value else ("false", "0")

    def parse(text: str) -> bool:
        if text.lower() not in words:
            raise argparse.ArgumentTypeError(f"{missing(feature)}; only {words[0]} is taken")
        return value

    return parse


def missing(feature: str) -> str:
    """The message for a feature of tritonserver that is missing, one of NOT_YET or AGREED, with what to do instead."""
    remedy = _REMEDIES.get(feature)
    return f"{feature} not supported yet" + (f"; {remedy}" if remedy else "")


# Checks of options together


def contradiction(arguments: argparse.Namespace) -> str:
    """The error of options that are valid individually but not together, "" if there is none."""
    if arguments.load_model and arguments.model_control_mode != "explicit":
        return "--load-model chooses what is loaded at start only with --model-control-mode=explicit"
    if flaw := contradiction_of_wings(arguments):
        return flaw
    if flaw := trace_choice(arguments.trace_config).flaw:
        return f"--trace-config: {flaw}"
    if "*" in arguments.load_model and set(arguments.load_model) != {"*"}:
        return "Wildcard model name '*' must be the ONLY startup model if specified at all."
    if group := _repeated_group(arguments.http_restricted_api):
        return f"--http-restricted-api: restricted api '{group}' can not be specified in multiple config groups"
    total = arguments.http_max_total_input_size
    if total is not None and total < BODIES_OF_A_REQUEST * arguments.http_max_input_size:
        return (
            "--http-max-total-input-size must be at least twice --http-max-input-size: a compressed body and its "
            "expanded form count"
        )
    if group := _repeated_group(arguments.grpc_restricted_protocol):
        return f"--grpc-restricted-protocol: protocol '{group}' can not be specified in multiple config groups"
    return _contradiction_of_certificates(arguments)


def _contradiction_of_certificates(arguments: argparse.Namespace) -> str:
    if (arguments.http_server_cert is None) != (arguments.http_server_key is None):
        return "--http-server-cert and --http-server-key go together"
    if arguments.http_root_cert and not arguments.http_server_cert:
        return "--http-root-cert has no effect without --http-server-cert"
    files = (arguments.grpc_server_cert, arguments.grpc_server_key)
    if arguments.grpc_use_ssl_mutual or arguments.grpc_use_ssl:
        if None in files:
            return "--grpc-use-ssl needs --grpc-server-cert and --grpc-server-key"
        if arguments.grpc_use_ssl_mutual and not arguments.grpc_root_cert:
            return "--grpc-use-ssl-mutual needs --grpc-root-cert"
        if arguments.grpc_root_cert and not arguments.grpc_use_ssl_mutual:
            return "--grpc-root-cert has no effect without --grpc-use-ssl-mutual true: clients would not be asked"
    elif arguments.grpc_use_ssl is None and any((*files, arguments.grpc_root_cert)):
        return "certificates for gRPC have no effect without --grpc-use-ssl true"
    return ""


def _repeated_group(restrictions: Iterable[Restriction]) -> str:
    """An API group that several restrictions name, "" if there is none."""
    counts = Counter(group for one in restrictions for group in one.groups)
    return next((group for group, count in counts.items() if count > 1), "")


# From parsed arguments without a contradiction to the options of each part


def run_arguments(*words: str) -> argparse.Namespace:
    """The arguments of a `flowserve run` with these words."""
    parser = argparse.ArgumentParser()
    add_quiet(parser)
    add_run_arguments(parser)
    arguments = parser.parse_args(words)
    arguments.repositories = named_repositories(arguments)
    return arguments


def without_effect(arguments: argparse.Namespace) -> list[str]:
    """The given options without effect, settings of backends that no backend reads among them."""
    settings = [
        (backend, key)
        for backend, key, _ in arguments.backend_config
        if backend in _WITHOUT_SETTINGS or key in ONNXRUNTIME_UNUSED
    ]
    numbers = [name for name in WITHOUT_EFFECT if _value(arguments, name) is not None]
    return [*numbers, *(f"--backend-config={backend},{key}" for backend, key in settings)]


def _value(arguments: argparse.Namespace, option: str) -> Any:
    return getattr(arguments, option.removeprefix("--").replace("-", "_"))


def warning_of(names: Sequence[str]) -> str:
    """One line about the given options without effect."""
    reasons = {name: WITHOUT_EFFECT.get(name) or _why_unused(name) for name in names}
    return "without effect here: " + ", ".join(f"{name} ({reason})" for name, reason in reasons.items())


def _why_unused(setting: str) -> str:
    is_tuning = setting.rpartition(",")[2] in ONNXRUNTIME_UNUSED
    return "models share the cores here" if is_tuning else "this backend has no settings"


def backend_settings(arguments: argparse.Namespace) -> dict[str, dict[str, str]]:
    """The settings of each backend. The last value wins if one is given twice, as on tritonserver."""
    settings: dict[str, dict[str, str]] = {}
    for backend, key, value in arguments.backend_config:
        if key not in ONNXRUNTIME_UNUSED:
            settings.setdefault(backend, {})[key] = value
    return settings


def metrics_port(arguments: argparse.Namespace) -> int | None:
    """The separate port for metrics, None for none. An address without a port has tritonserver's port."""
    if not arguments.allow_metrics or (arguments.metrics_port is None and arguments.metrics_address is None):
        return None
    return DEFAULT_METRICS_PORT if arguments.metrics_port is None else int(arguments.metrics_port)


def log_choice(arguments: argparse.Namespace) -> LogChoice:
    """--quiet wins over --log-info."""
    return LogChoice(
        log_file=arguments.log_file,
        log_info=arguments.log_info and not arguments.quiet,
        log_warning=arguments.log_warning,
        log_error=arguments.log_error,
        log_verbose_level=arguments.log_verbose,
        log_format=arguments.log_format,
    )


def input_budget(arguments: argparse.Namespace) -> Budget:
    """The bodies, gRPC messages and HTTP connections that the server takes at once. Called once the limit of open files
    is raised.
    """
    memory = memory_bytes()
    # A body may be held four times while it is decoded, so this share bounds half of the memory.
    one = max(BODIES_OF_A_REQUEST * arguments.http_max_input_size, arguments.grpc_max_message_size)
    bodies = max(memory // 8, one)
    descriptors_each = 3 if arguments.http_server_cert else 1
    connections = min(memory // CONNECTION_BYTES, open_files() * 3 // 4 // descriptors_each)
    return Budget(arguments.http_max_total_input_size or bodies, arguments.http_max_connections or max(connections, 16))


def http_certificate(arguments: argparse.Namespace) -> Certificate | None:
    """None: plain HTTP."""
    if arguments.http_server_cert is None:
        return None
    return arguments.http_server_cert, arguments.http_server_key, arguments.http_root_cert


def grpc_options(arguments: argparse.Namespace) -> GrpcOptions:
    has_tls = arguments.grpc_use_ssl or arguments.grpc_use_ssl_mutual
    certificate = arguments.grpc_server_cert, arguments.grpc_server_key, arguments.grpc_root_cert
    return GrpcOptions(
        max_message_bytes=arguments.grpc_max_message_size,
        max_calls=arguments.grpc_max_calls,
        channel=_channel(arguments),
        certificate=certificate if has_tls else None,
        restrictions=_grpc_restrictions(arguments.http_restricted_api, arguments.grpc_restricted_protocol),
        forward_pattern=arguments.grpc_header_forward_pattern,
        bytes_elements=arguments.max_bytes_elements,
    )


def open_over_http(arguments: argparse.Namespace) -> list[str]:
    """API groups that are restricted over gRPC only."""
    closed = {group for one in arguments.http_restricted_api for group in one.groups}
    return [group for one in arguments.grpc_restricted_protocol for group in one.groups if group not in closed]


def _channel(arguments: argparse.Namespace) -> tuple[tuple[str, int], ...]:
    channel = [(_PERMIT_WITHOUT_CALLS, int(arguments.grpc_keepalive_permit_without_calls))]
    for option, (name, _, _) in _CHANNEL.items():
        value = _value(arguments, option)
        if value or name not in _NO_LIMIT:
            channel.append((name, value))
    if level := _COMPRESSION_LEVELS.index(arguments.grpc_infer_response_compression_level):
        channel.append((_COMPRESSION, level))
    return tuple(channel)


def _grpc_restrictions(http: list[Restriction], own: list[Restriction]) -> tuple[Restriction, ...]:
    """All restrictions of gRPC. A group restricted over HTTP only gets HTTP's key, so that it is not open here."""
    closed = {group for one in own for group in one.groups}
    inherited = [replace(one, groups=tuple(group for group in one.groups if group not in closed)) for one in http]
    return (*(replace(one, name=KEY_PREFIX + one.name) for one in own), *(one for one in inherited if one.groups))


def metrics_choice(arguments: argparse.Namespace) -> MetricsChoice | None:
    """None: no metrics."""
    if not arguments.allow_metrics:
        return None
    settings: dict[str, bool | tuple[float, ...]] = dict(arguments.metrics_config)  # the last value wins
    shares = settings.get(METRICS_QUANTILES, QUANTILES) if settings.get("summary_latencies") else ()
    return MetricsChoice(
        has_latency_counters=bool(settings.get("counter_latencies", True)),
        has_first_response=bool(settings.get("histogram_latencies", True)),
        quantiles=shares if isinstance(shares, tuple) else (),
        has_machine=arguments.allow_cpu_metrics,
        has_gpus=arguments.allow_gpu_metrics,
        interval_ms=arguments.metrics_interval_ms,
    )


def trace_choice(settings: Sequence[TraceSetting]) -> TraceChoice:
    """The combined settings. The last value wins if a setting is given twice, except levels, which accumulate."""
    last = {(mode, name): value for mode, name, value in settings}
    levels = {value for mode, name, value in settings if (mode, name) == ("", "level")} - {OFF}
    return TraceChoice(
        trace_file=last.get((TRITON, "file"), ""),
        trace_level=tuple(level for level in LEVELS if level in levels) or (OFF,),
        trace_rate=int(last.get(("", "rate"), 1000)),
        trace_count=int(last.get(("", "count"), -1)),
        log_frequency=int(last.get((TRITON, "log-frequency"), 0)),
        trace_mode=last.get(("", "mode"), TRITON),
    )


def trace_api_max_bytes(settings: Sequence[TraceSetting]) -> int:
    """The bytes that traces of settings changed by clients may take in files."""
    given = [int(value) for mode, name, value in settings if (mode, name) == (TRITON, "api-max-bytes")]
    return given[-1] if given else API_MAX_BYTES


def opentelemetry_settings(settings: Sequence[TraceSetting]) -> dict[str, tuple[str, ...]]:
    """The settings of the opentelemetry mode, each with all its values."""
    given: dict[str, tuple[str, ...]] = {}
    for mode, name, value in settings:
        if mode == OPENTELEMETRY:
            given[name] = (*given.get(name, ()), value)
    return given
