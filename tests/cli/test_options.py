"""Options of the command, and usage errors: one line on standard error, exit status 2."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from flowserve.cli.main import main
from flowserve.cli.option_values import pattern
from flowserve.cli.options import (
    AGREED,
    INSTEAD,
    NOT_YET,
    QUANTILES,
    WITHOUT_EFFECT,
    add_run_arguments,
    grpc_options,
    input_budget,
    is_strict,
    metrics_choice,
    metrics_port,
    open_over_http,
    run_arguments,
    warning_of,
    without_effect,
)
from flowserve.grpc.options import GrpcOptions
from flowserve.http.server.request_parser import Limits
from flowserve.observe.settings import MetricsChoice
from flowserve.runtime.protocol import ElementLimits, Restriction
from flowserve.version import __version__


def _complaint(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.endswith("\n")
    assert printed.err.count("\n") == 1
    return printed.err


@pytest.mark.fault("K1")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--http-prt", "1"], "unknown option --http-prt; did you mean --http-port?"),
        (["--http-port", "eighty"], "--http-port: expected a whole number from 0 to 65535, got 'eighty'"),
        (["--http-port", "65536"], "--http-port: expected a whole number from 0 to 65535, got 65536"),
        (["--http-port=-1"], "--http-port: expected a whole number from 0 to 65535, got -1"),
        (["--http-port", "٨"], "expected a whole number"),
        (["--http-max-input-size", "0"], "--http-max-input-size: expected a whole number, 1 or more, got 0"),
        (["--exit-timeout-secs", "9" * 30], "--exit-timeout-secs: expected a whole number, 0 or more"),
        (["--exit-on-error", "maybe"], "--exit-on-error: expected true, false, 1 or 0, got 'maybe'"),
        (["--model-control-mode", "sometimes"], "--model-control-mode: expected none or poll or explicit"),
        (["--load-model", "a"], "--load-model chooses what is loaded at start only with --model-control-mode=explicit"),
        (["--load-model", "a", "--model-control-mode=poll"], "only with --model-control-mode=explicit"),
        (
            ["--model-control-mode=explicit", "--load-model=*", "--load-model=a"],
            "Wildcard model name '*' must be the ONLY startup model if specified at all.",
        ),
        (["--repository-poll-secs", "0"], "--repository-poll-secs: expected a whole number, 1 or more, got 0"),
        (["--rate-limit", "on"], "--rate-limit: expected off or execution_count, got 'on'"),
        (["--rate-limit-resource", "R"], "--rate-limit-resource: expected NAME:COUNT or NAME:COUNT:DEVICE, got 'R'"),
        (["--rate-limit-resource", "R:1:2:3"], "expected NAME:COUNT or NAME:COUNT:DEVICE, got 'R:1:2:3'"),
        (["--rate-limit-resource", "R:-1"], "expected NAME:COUNT or NAME:COUNT:DEVICE, got 'R:-1'"),
        (["--python-execution", "gpu"], "--python-execution: expected process or thread or inline, got 'gpu'"),
        (["--cuda-memory-pool-byte-size", "4096"], "--cuda-memory-pool-byte-size: expected GPU:BYTES, got '4096'"),
        (["--cuda-memory-pool-byte-size", "x:1"], "expected a whole number, 0 or more, got 'x'"),
        (["--pinned-memory-pool-byte-size=-1"], "--pinned-memory-pool-byte-size: expected a whole number, 0 or more"),
        (["--backend-config=onnxruntime"], "--backend-config: expected BACKEND,KEY=VALUE, got 'onnxruntime'"),
        (["--backend-config=onnxruntime,x=1"], "onnxruntime has no setting 'x'; it has default-max-batch-size, intra"),
        (["--backend-config=default-max-batch-size=0"], "expected a whole number from 1 to 2147483647, got 0"),
        (["--port=1"], "--port: the option is --http-port"),
        (["--model-repository"], "--model-repository/--model-store: expected one argument"),
        (["--model-repository="], "--model-repository/--model-store: the name of a repository is empty"),
        ([""], "REPO: the name of a repository is empty"),
        (["--http-port"], "--http-port: expected one argument"),
        (["--http-restricted-api", "inference"], "expected GROUP[,GROUP...]:HEADER=VALUE, got 'inference'"),
        (
            ["--grpc-restricted-protocol", "infer:k=v"],
            "unknown restricted api 'infer'; use health, metadata, inference",
        ),
        (
            ["--grpc-restricted-protocol=health,trace:k=v", "--grpc-restricted-protocol=trace:k=v"],
            "protocol 'trace' can not be specified in multiple config groups",
        ),
        (["--grpc-use-ssl=true"], "--grpc-use-ssl needs --grpc-server-cert and --grpc-server-key"),
        (
            ["--grpc-use-ssl-mutual=1", "--grpc-server-cert=c", "--grpc-server-key=k"],
            "--grpc-use-ssl-mutual needs --grpc-root-cert",
        ),
        (
            ["--grpc-use-ssl=1", "--grpc-server-cert=c", "--grpc-server-key=k", "--grpc-root-cert=r"],
            "--grpc-root-cert has no effect without --grpc-use-ssl-mutual true: clients would not be asked",
        ),
        (["--grpc-server-cert=c"], "certificates for gRPC have no effect without --grpc-use-ssl true"),
        (["--grpc-header-forward-pattern", "("], "--grpc-header-forward-pattern: expected a regular expression"),
        (["--grpc-infer-response-compression-level=max"], "expected none or low or medium or high, got 'max'"),
        (
            ["--http-allowed-hosts", "http://a"],
            "expected HOST[,HOST...]: names without scheme and port, *.NAME, or *, got",
        ),
        (
            ["--http-cors-origins", "app.example"],
            "expected ORIGIN[,ORIGIN...]: SCHEME://HOST[:PORT] without a path, or *",
        ),
        (["--http-restricted-api", "inference:=x"], "expected GROUP[,GROUP...]:HEADER=VALUE"),
        (["--http-restricted-api", "infer:k=v"], "unknown restricted api 'infer'; use health, metadata, inference"),
        (
            ["--http-restricted-api=health,trace:k=v", "--http-restricted-api=trace:k=v"],
            "restricted api 'trace' can not be specified in multiple config groups",
        ),
        (["--http-max-total-input-size", "100000000"], "must be at least twice --http-max-input-size"),
        (["--http-max-connections", "0"], "--http-max-connections: expected a whole number, 1 or more, got 0"),
        (["--http-server-cert", "c.pem"], "--http-server-cert and --http-server-key go together"),
        (["--http-root-cert", "c.pem"], "--http-root-cert has no effect without --http-server-cert"),
        (["--http-header-forward-pattern", "("], "--http-header-forward-pattern: expected a regular expression"),
        (["--metrics-port", "x"], "--metrics-port: expected a whole number from 0 to 65535, got 'x'"),
        (["--trace-config", "level"], "--trace-config: expected SETTING=VALUE or MODE,SETTING=VALUE, got 'level'"),
        (["--trace-config", "level=MAX"], "--trace-config: expected the level OFF, TIMESTAMPS, TENSORS, got 'MAX'"),
        (["--trace-config", "rate=-1"], "--trace-config: expected a whole number from 0 to 4294967295, got -1"),
        (["--trace-config", "file=x"], "without a mode there is no setting 'file'; there are level, rate, count, mode"),
        (
            ["--trace-config", "triton,url=x"],
            "mode triton has no setting 'url'; there are file, log-frequency, api-max-bytes",
        ),
        (["--trace-config", "triton,api-max-bytes=-1"], "--trace-config: expected a whole number from 0 to"),
        (["--trace-config", "jaeger,url=x"], "expected the mode triton or opentelemetry, got 'jaeger'"),
        (["--trace-config", "opentelemetry,resource=x"], "--trace-config: expected resource=KEY=VALUE, got 'x'"),
        (["--trace-config", "level=TIMESTAMPS"], "--trace-config: trace file name is not given"),
        (["--trace-rate", "often"], "--trace-rate: expected a whole number from 0 to 4294967295, got 'often'"),
        (["--trace-level", "x"], "--trace-level: expected the level OFF, TIMESTAMPS, TENSORS, got 'x'"),
        (["--response-cache-byte-size", "x"], "--response-cache-byte-size: expected a whole number, 0 or more"),
        (["--model-config-name", "a/b"], "--model-config-name: expected a name without slashes and spaces, got 'a/b'"),
        (["--model-config-name", ".."], "expected a name without slashes and spaces, got '..'"),
        (["--log-verbose", "yes"], "--log-verbose: expected a whole number, 0 or more, got 'yes'"),
        (
            ["--allow-sagemaker=true"],
            "SageMaker's endpoints are not supported yet; a proxy in the container can pass its GET /ping to",
        ),
        (["--sagemaker-port=8080"], "can pass its GET /ping to /v2/health/ready and POST /invocations to"),
        (["--allow-vertex-ai"], "the predict route /v2/models/MODEL/infer"),
        (["--vertex-ai-port=8080"], "upload the container with the health route /v2/health/ready"),
        (["--reuse-http-port=true"], "--workers N starts several servers behind one port"),
        (["--metrics-config", "buckets=1"], "expected KEY=VALUE with one of counter_latencies, histogram_latencies"),
        (["--metrics-config", "summary_quantiles=2:0.1"], "expected quantiles such as 0.5:0.05,0.99:0.001"),
        (["--metrics-config", "summary_latencies=maybe"], "expected true, false, 1 or 0, got 'maybe'"),
        (["--allow-client-shm", "maybe"], "--allow-client-shm: expected true, false, 1 or 0, got 'maybe'"),
    ],
)
def test_a_wrong_option_is_one_line_that_names_it(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    complaint = _complaint(["run", "models", *arguments], capsys)
    assert complaint.startswith("flowserve run: ")
    assert said in complaint


@pytest.mark.fault("K1")
@pytest.mark.parametrize("option", sorted(NOT_YET))
def test_every_option_of_tritonserver_that_is_missing_names_its_feature(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"{option}: {NOT_YET[option]} not supported yet" in _complaint(["run", option, "x", "models"], capsys)


def test_the_repository_has_tritonservers_spellings_too() -> None:
    for option in ("--model-repository", "--model-store"):
        for words in ((f"{option}=a",), (option, "a")):
            assert run_arguments(*words).repositories == [Path("a")]
    together = run_arguments("a", "--model-repository=b", "--model-store", "c", "--model-repository=a")
    assert together.repositories == [Path("a"), Path("b"), Path("c")]


@pytest.mark.parametrize("command", ["run", "check"])
def test_commands_take_the_repository_as_an_option(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "models"
    assert main([command, f"--model-repository={missing}"]) == 1
    assert f"model repository '{missing}' does not exist" in capsys.readouterr().err


def test_older_spellings_set_what_the_newer_ones_set() -> None:
    older = ("--trace-file=t.json", "--trace-level=MAX", "--trace-rate=5", "--trace-count=7", "--trace-log-frequency=9")
    settings = ("triton,file=t.json", "level=TIMESTAMPS", "rate=5", "count=7", "triton,log-frequency=9")
    newer = (f"--trace-config={setting}" for setting in settings)
    assert run_arguments("m", *older).trace_config == run_arguments("m", *newer).trace_config
    assert run_arguments("m", "--response-cache-byte-size=9").cache_config == 9
    assert run_arguments("m", "--response-cache-byte-size=0").cache_config is None
    assert is_strict(run_arguments("m", "--strict-model-config=true"))
    assert is_strict(run_arguments("m", "--disable-auto-complete-config", "--strict-model-config=false"))
    assert not is_strict(run_arguments("m", "--strict-model-config=false"))
    assert run_arguments("m", "--log-verbose=true").log_verbose == 1


@pytest.mark.parametrize(
    ("words", "port"),
    [
        ((), None),
        (("--metrics-port=9",), 9),
        (("--metrics-address=0.0.0.0",), 8002),
        (("--allow-metrics=false", "--metrics-port=9"), None),
    ],
)
def test_the_port_of_metrics_follows_tritonserver(words: tuple[str, ...], port: int | None) -> None:
    assert metrics_port(run_arguments("models", *words)) == port


@pytest.mark.parametrize("option", sorted(AGREED))
def test_a_switch_is_accepted_at_the_existing_behaviour_and_refused_otherwise(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    value, feature = AGREED[option]
    for word in ("true", "1") if value else ("false", "0"):
        assert without_effect(run_arguments("models", f"{option}={word}")) == []
    refused = _complaint(["run", "models", f"{option}={str(not value).lower()}"], capsys)
    assert f"{option}: {feature} not supported yet" in refused


def test_tuning_options_are_accepted_with_a_warning() -> None:
    given = without_effect(run_arguments("models", *(f"{option}=4" for option in WITHOUT_EFFECT)))
    assert set(given) == set(WITHOUT_EFFECT)
    assert warning_of(["--http-thread-count", "--http-thread-count"]) == (
        "without effect here: --http-thread-count (one event loop serves all HTTP connections)"
    )
    settings = ["python,shm-default-byte-size=1", "onnxruntime,intra_op_thread_count=1", "of_a_plug_in,what=ever"]
    given = without_effect(run_arguments("models", *(f"--backend-config={one}" for one in settings)))
    assert "models share the cores here" in warning_of(["--backend-config=onnxruntime,enable-global-threadpool"])
    assert warning_of(given) == (
        "without effect here: --backend-config=python,shm-default-byte-size (this backend has no settings)"
    )


# Options of tritonserver, in the order of its help; some exist only in builds with the feature.
TRITONSERVER = """
    id exit-timeout-secs model-store model-repository exit-on-error disable-auto-complete-config strict-readiness
    strict-model-config model-control-mode repository-poll-secs load-model model-config-name model-load-thread-count
    model-load-retry-count model-namespacing enable-peer-access log-verbose log-info log-warning log-error log-format
    log-file allow-http http-address http-port reuse-http-port http-header-forward-pattern http-thread-count
    http-restricted-api http-max-input-size allow-grpc grpc-address grpc-port reuse-grpc-port
    grpc-header-forward-pattern grpc-infer-thread-count grpc-infer-allocation-pool-size grpc-max-response-pool-size
    grpc-use-ssl grpc-use-ssl-mutual grpc-server-cert grpc-server-key grpc-root-cert
    grpc-infer-response-compression-level grpc-keepalive-time grpc-keepalive-timeout
    grpc-keepalive-permit-without-calls grpc-http2-max-pings-without-data
    grpc-http2-min-recv-ping-interval-without-data grpc-http2-max-ping-strikes grpc-max-connection-age
    grpc-max-connection-age-grace grpc-restricted-protocol allow-sagemaker sagemaker-port sagemaker-safe-port-range
    sagemaker-thread-count allow-vertex-ai vertex-ai-port vertex-ai-thread-count vertex-ai-default-model allow-metrics
    allow-gpu-metrics allow-cpu-metrics metrics-address metrics-port metrics-interval-ms metrics-config trace-file
    trace-level trace-rate trace-count trace-log-frequency trace-config backend-directory repoagent-directory
    cache-directory backend-config host-policy rate-limit rate-limit-resource response-cache-byte-size cache-config
    pinned-memory-pool-byte-size cuda-memory-pool-byte-size cuda-virtual-address-size min-supported-compute-capability
    buffer-manager-thread-count model-load-gpu-limit allow-client-shm
"""


def test_every_option_of_tritonserver_is_accepted_or_refused_by_its_feature() -> None:
    parser = argparse.ArgumentParser()
    add_run_arguments(parser)
    taken = {option for action in parser._actions for option in action.option_strings}
    known = {f"--{name}" for name in TRITONSERVER.split()}
    assert known - taken - {*NOT_YET} - {*INSTEAD} == set()
    assert not taken & ({*NOT_YET} | {*INSTEAD})


@pytest.mark.fault("K1")
def test_a_command_without_repository_or_of_another_name_says_what_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "which repository?" in _complaint(["run"], capsys)
    assert "which repository?" in _complaint(["check"], capsys)
    assert "there is no command 'serve'; did you mean run?" in _complaint(["serve", "models"], capsys)


@pytest.mark.parametrize("text", ["true", "TRUE", "1", "false", "0"])
def test_booleans_are_written_as_for_tritonserver(text: str) -> None:
    from flowserve.cli.option_values import boolean

    assert boolean(text) is (text.lower() in ("true", "1"))


def test_help_shows_examples_and_the_version_comes_from_one_place(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["run", "--help"], ["check", "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        assert "examples:" in capsys.readouterr().out
    done = subprocess.run([sys.executable, "-m", "flowserve", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"flowserve {__version__}\n"


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from flowserve.cli import main; print(sorted({'numpy', 'trio', 'onnxruntime'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_limits_of_elements_are_those_of_the_front_ends() -> None:
    arguments = run_arguments("models")
    assert ElementLimits(arguments.max_bytes_elements, arguments.http_max_json_elements) == ElementLimits()
    assert grpc_options(arguments).bytes_elements == ElementLimits().bytes_elements
    assert Limits(max_body_bytes=arguments.http_max_input_size) == Limits()


def test_the_defaults_are_safe() -> None:
    options = run_arguments("models")
    assert options.http_address == options.grpc_address == "127.0.0.1"
    assert options.http_max_input_size == options.grpc_max_message_size == 64 << 20
    assert options.exit_on_error
    assert options.strict_readiness
    assert not options.allow_client_shm
    assert options.http_allowed_hosts == options.http_cors_origins == []


@pytest.mark.fault("W3")
def test_the_default_limits_of_bodies_and_connections_follow_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gibibyte = 1 << 30
    for memory, files, body, connection in (
        (32 * gibibyte, 65536, 4 * gibibyte, 49152),
        (2 * gibibyte, 65536, gibibyte // 4, 4096),
        (gibibyte // 2, 1024, gibibyte // 8, 768),
        (1, 1, gibibyte // 8, 16),
    ):
        monkeypatch.setattr("flowserve.cli.options.memory_bytes", lambda memory=memory: memory)
        monkeypatch.setattr("flowserve.cli.options.open_files", lambda files=files: files)
        budget = input_budget(run_arguments("models"))
        assert (budget.max_body_bytes, budget.max_connections) == (body, connection)
    options = ("--http-max-total-input-size=200000000", "--http-max-connections=7")
    budget = input_budget(run_arguments("models", *options))
    assert (budget.max_body_bytes, budget.max_connections) == (200_000_000, 7)


def chosen(*options: str) -> GrpcOptions:
    return grpc_options(run_arguments("graphs", *options))


def test_restrictions_of_http_apply_to_grpc_by_default() -> None:
    http, grpc = "--http-restricted-api=inference,health:key=value", "--grpc-restricted-protocol=health,trace:mine=v"
    assert chosen(http, grpc).restrictions == (
        Restriction(("health", "trace"), "triton-grpc-protocol-mine", "v"),
        Restriction(("inference",), "key", "value"),
    )
    assert open_over_http(run_arguments("graphs", http, grpc)) == ["trace"]
    assert open_over_http(run_arguments("graphs", http)) == []
    assert chosen().restrictions == ()


def test_connection_options_have_grpcs_names_and_tritons_defaults() -> None:
    assert dict(chosen().channel) == {
        "grpc.keepalive_permit_without_calls": 0,
        "grpc.keepalive_time_ms": 7_200_000,
        "grpc.keepalive_timeout_ms": 20_000,
        "grpc.http2.max_pings_without_data": 2,
        "grpc.http2.min_ping_interval_without_data_ms": 300_000,
        "grpc.http2.max_ping_strikes": 2,
    }
    given = chosen(
        "--grpc-keepalive-permit-without-calls=true",
        "--grpc-keepalive-time=5",
        "--grpc-http2-max-ping-strikes=0",
        "--grpc-max-connection-age=7",
        "--grpc-max-connection-age-grace=8",
        "--grpc-infer-response-compression-level=medium",
    )
    assert dict(given.channel).items() >= {
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 5),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_connection_age_ms", 7),
        ("grpc.max_connection_age_grace_ms", 8),
        ("grpc.default_compression_level", 2),
    }


def test_metrics_are_chosen_as_for_tritonserver() -> None:
    def chosen(*options: str) -> MetricsChoice | None:
        return metrics_choice(run_arguments("graphs", *options))

    assert chosen() == MetricsChoice()
    assert chosen("--allow-metrics=false") is None
    assert chosen("--metrics-config=summary_latencies=true") == MetricsChoice(quantiles=QUANTILES)
    assert chosen("--metrics-config=summary_quantiles=0.5") == MetricsChoice()
    quantiles = ["--metrics-config=summary_latencies=1", "--metrics-config=summary_quantiles=0.5:0.05,1,0.99:0.001"]
    more = [
        "--metrics-config=counter_latencies=false",
        "--metrics-interval-ms=5",
        "--allow-cpu-metrics=0",
        "--allow-gpu-metrics=0",
    ]
    assert chosen(*quantiles, *more) == MetricsChoice(
        has_latency_counters=False, quantiles=(0.5, 1.0, 0.99), has_machine=False, has_gpus=False, interval_ms=5
    )


def test_a_certificate_is_used_only_with_tls() -> None:
    files = ("--grpc-server-cert=c", "--grpc-server-key=k")
    assert chosen("--grpc-use-ssl=true", *files).certificate == (Path("c"), Path("k"), None)
    assert chosen("--grpc-use-ssl=false", *files).certificate is None
    mutual = chosen("--grpc-use-ssl-mutual=true", "--grpc-root-cert=r", *files)
    assert mutual.certificate == (Path("c"), Path("k"), Path("r"))


@pytest.mark.parametrize(
    ("written", "matched", "other"),
    [
        ("x-(tenant|user)", ["X-Tenant", "my-x-user"], ["tenant"]),
        ("(?-i)^X-.*|y-a", ["X-One", "my-y-a"], ["x-one", "Y-A", "my-X-One"]),
        ("(?-i)^X(?i)-y|z", ["X-Y", "X-y", "Z"], ["x-y"]),
        ("((?-i)A|B)c", ["AC", "Bc"], ["ac", "bc"]),
        (r"[(]|\(\?-i\)", ["a(", "(?-I)"], ["a"]),
    ],
)
def test_a_pattern_of_headers_has_the_flags_of_re2(written: str, matched: list[str], other: list[str]) -> None:
    compiled = pattern(written)
    assert [name for name in [*matched, *other] if compiled.search(name)] == matched


@pytest.mark.parametrize("written", ["(", "a)", "(?U)x", "[a"])
def test_a_pattern_that_is_none_is_refused(written: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected a regular expression, got"):
        pattern(written)
