"""Options of the gRPC server: TLS, restricted API groups, header forwarding, compression, connection age."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from flowserve.grpc.health_pb2 import HealthCheckRequest
from flowserve.grpc.service import GROUP
from flowserve.runtime.protocol import GROUPS
from flowserve.testing.serve import DidNotServe, Served
from tests.support.forked import serving

pytestmark = pytest.mark.server
KEY = {"triton-grpc-protocol-admin-key": "s3:cr=t"}


@pytest.fixture(scope="module")
def front(repository: Path, papers: Path, options: tuple[str, ...]) -> Iterator[Served]:
    """A server with the tested options."""
    more = [
        "--grpc-use-ssl-mutual=true",
        f"--grpc-server-cert={papers}/server.pem",
        f"--grpc-server-key={papers}/server.key",
        f"--grpc-root-cert={papers}/client.pem",
        "--grpc-restricted-protocol=model-repository,health:Admin-Key=s3:cr=t",
        "--http-restricted-api=logging,health:http-key=other",
        "--grpc-header-forward-pattern=x-.*|priority",
        "--grpc-infer-response-compression-level=low",
        "--grpc-max-connection-age=1000",
        "--grpc-keepalive-permit-without-calls=true",
    ]
    with serving(repository, *options, *more) as running:
        yield running
        assert "Traceback" not in running.log


@contextmanager
def connected(address: str, papers: Path) -> Iterator[triton.InferenceServerClient]:
    papers_of_ours = {
        "root_certificates": f"{papers}/server.pem",
        "private_key": f"{papers}/client.key",
        "certificate_chain": f"{papers}/client.pem",
    }
    named = [("grpc.ssl_target_name_override", "localhost")]
    with triton.InferenceServerClient(address, ssl=True, channel_args=named, **papers_of_ours) as made:
        yield made


@pytest.fixture
def client(front: Served, papers: Path) -> Iterator[triton.InferenceServerClient]:
    with connected(front.grpc_address, papers) as made:
        yield made


def numbers(*values: float) -> triton.InferInput:
    array = np.array(values, np.float32)
    made = triton.InferInput("IN", list(array.shape), "FP32")
    made.set_data_from_numpy(array)
    return made


@pytest.mark.fault("Z9")
def test_only_clients_with_a_certificate_of_the_authority_are_served(
    front: Served, papers: Path, client: triton.InferenceServerClient
) -> None:
    assert client.is_model_ready("echo", headers=KEY)
    certificate = (papers / "server.pem").read_bytes()
    named = [("grpc.ssl_target_name_override", "localhost")]
    for channel in (
        grpc.secure_channel(front.grpc_address, grpc.ssl_channel_credentials(certificate), named),
        grpc.insecure_channel(front.grpc_address),
    ):
        with channel, pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=60)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


@pytest.mark.fault("W1")
def test_a_web_page_cannot_send_a_call(front: Served, papers: Path, client: triton.InferenceServerClient) -> None:
    for mode in ("no-cors", "navigate", "same-origin"):
        page = {**KEY, "sec-fetch-mode": mode}
        for call, given in (
            (client.load_model, ("echo",)),
            (client.infer, ("echo", [numbers(1)])),
            (client.is_server_live, ()),
        ):
            with pytest.raises(InferenceServerException, match="web pages") as refused:
                call(*given, headers=page)
            assert refused.value.status() == "StatusCode.PERMISSION_DENIED"
    assert client.is_model_ready("echo", headers={**KEY, "sec-fetch-mode": "cors"})  # a proxy answered the preflight


@pytest.mark.fault("Z9")
def test_old_versions_of_tls_are_refused(front: Served, papers: Path) -> None:
    context = ssl.create_default_context(cafile=f"{papers}/server.pem")
    context.load_cert_chain(papers / "client.pem", papers / "client.key")
    context.set_ciphers("DEFAULT@SECLEVEL=0")  # or the client itself would refuse
    context.set_alpn_protocols(["h2"])
    host, port = front.grpc_address.split(":")

    def connect(version: ssl.TLSVersion) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the old version is intended
            context.minimum_version = context.maximum_version = version
        with socket.create_connection((host, int(port)), timeout=60) as plain:
            context.wrap_socket(plain, server_hostname="localhost").close()

    for version in (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1):
        with pytest.raises(OSError, match=r"EOF|PROTOCOL|reset"):
            connect(version)
    connect(ssl.TLSVersion.TLSv1_2)


@pytest.mark.fault("Z6")
def test_restricted_calls_need_their_key_and_restrictions_of_http_apply_to_grpc(
    client: triton.InferenceServerClient,
) -> None:
    admin = "This protocol is restricted, expecting header 'triton-grpc-protocol-admin-key'"
    other = "This protocol is restricted, expecting header 'http-key'"
    for call, text, key in (
        (client.is_server_live, admin, KEY),
        (client.get_model_repository_index, admin, KEY),
        (client.get_log_settings, other, {"http-key": "other"}),
    ):
        for wrong in (None, {next(iter(key)): "wrong"}, {"x": next(iter(key.values()))}):
            with pytest.raises(InferenceServerException) as refused:
                call(headers=wrong)
            assert (refused.value.status(), refused.value.message()) == ("StatusCode.PERMISSION_DENIED", text)
        assert call(headers=key)
    assert client.get_model_metadata("echo").name == "echo"


def test_every_api_group_has_calls() -> None:
    assert {*GROUP.values()} == {*GROUPS}


def test_the_health_service_is_restricted_with_health(front: Served, papers: Path) -> None:
    files = [(papers / name).read_bytes() for name in ("server.pem", "client.key", "client.pem")]
    named = [("grpc.ssl_target_name_override", "localhost")]
    with grpc.secure_channel(front.grpc_address, grpc.ssl_channel_credentials(*files), named) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check", HealthCheckRequest.SerializeToString)
        with pytest.raises(grpc.RpcError) as refused:
            check(HealthCheckRequest(), timeout=60)
        assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
        assert check(HealthCheckRequest(), timeout=60, metadata=[*KEY.items()])


def test_headers_reach_the_model_and_a_parameter_of_the_request_wins(client: triton.InferenceServerClient) -> None:
    headers = {"x-tenant": "blue", "tenant": "red", "x-mine": "header"}
    answer = client.infer("tells", [numbers(1)], headers=headers, parameters={"depth": 2, "x-mine": "request"})
    assert json.loads(answer.as_numpy("OUT")[0]) == {"x-tenant": "blue", "depth": 2, "x-mine": "request"}
    with pytest.raises(InferenceServerException, match="the header 'priority' cannot be forwarded") as refused:
        client.infer("tells", [numbers(1)], headers={"priority": "1"})
    assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_headers_of_a_stream_are_forwarded_with_each_request(client: triton.InferenceServerClient) -> None:
    received: list[Any] = []
    done = threading.Semaphore(0)

    def take(result: Any, error: Any) -> None:
        received.append(error or json.loads(result.as_numpy("OUT")[0]))
        done.release()

    client.start_stream(take, headers={"x-tenant": "blue"})
    for n in range(2):
        client.async_stream_infer("tells", [numbers(1)], parameters={"n": n})
    assert all(done.acquire(timeout=60) for _ in range(2))
    client.stop_stream()
    assert received == [{"n": n, "x-tenant": "blue"} for n in range(2)]


@contextmanager
def counted(address: str) -> Iterator[tuple[str, list[int]]]:
    """A proxy that counts the bytes sent by the server."""
    sent: list[int] = []
    host, port = address.split(":")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def carry(source: socket.socket, target: socket.socket, counts: list[int]) -> None:
            with suppress(OSError):
                while data := source.recv(65536):
                    counts.append(len(data))
                    target.sendall(data)
                target.shutdown(socket.SHUT_WR)

        def serve() -> None:
            with listener.accept()[0] as near, socket.create_connection((host, int(port))) as far:
                inwards = threading.Thread(target=carry, args=(near, far, []))
                inwards.start()
                carry(far, near, sent)
                inwards.join()

        one = threading.Thread(target=serve)
        one.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", sent
        one.join(60)


def test_responses_are_compressed_if_the_operator_enables_it(front: Served, papers: Path) -> None:
    with counted(front.grpc_address) as (address, sent), connected(address, papers) as client:
        answer = client.infer("score", [numbers(*[1.0] * 250_000)])
    assert answer.as_numpy("OUT").tolist() == [1.0] * 250_000
    assert 0 < sum(sent) < 100_000  # of a million bytes


def test_a_connection_of_the_maximum_age_is_closed_and_the_client_reconnects(front: Served, papers: Path) -> None:
    files = [(papers / name).read_bytes() for name in ("server.pem", "client.key", "client.pem")]
    named = [("grpc.ssl_target_name_override", "localhost")]
    states: list[grpc.ChannelConnectivity] = []
    is_idle = threading.Event()

    def seen(state: grpc.ChannelConnectivity) -> None:
        states.append(state)
        if state == grpc.ChannelConnectivity.IDLE and grpc.ChannelConnectivity.READY in states:
            is_idle.set()

    with grpc.secure_channel(front.grpc_address, grpc.ssl_channel_credentials(*files), named) as channel:
        channel.subscribe(seen, try_to_connect=True)
        assert is_idle.wait(30), states
        call = channel.unary_unary("/inference.GRPCInferenceService/ServerMetadata")
        assert call(b"", timeout=60, wait_for_ready=True)


def test_unreadable_certificates_are_named_and_the_server_does_not_start(
    repository: Path, options: tuple[str, ...], papers: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty.pem").touch()
    given = [
        "--grpc-use-ssl=true",
        f"--grpc-server-cert={tmp_path}/empty.pem",
        f"--grpc-server-key={papers}/server.key",
    ]
    with pytest.raises(DidNotServe) as ended, serving(repository, *options, *given):
        pass
    assert f"TLS cannot be set up from {tmp_path}/empty.pem, {papers}/server.key" in ended.value.log
