"""Servers without extensions of the protocol, behind a proxy that wants a header, encrypted, or compressed."""

from __future__ import annotations

import json
import shutil
import subprocess
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compressor.config.check import CheckRequest
from compressor.errors import ErrorCode, InputError, ServerError, UsageError
from compressor.latency import check
from compressor.latency.triton import TritonModel
from tests.command import compress
from tests.latency.grpc_server import request_for, serving
from tests.latency.http_server import BINARY, Request, serving_http
from tests.latency.timers import EQUAL_TIMES

pytest.importorskip("tritonclient.http")
Cap = pytest.CaptureFixture[str]
TOKEN = "a-secret-0123456789"
HEADER = f"Authorization: Bearer {TOKEN}"
UNSENDABLE = (f"A-bin: {TOKEN}", f"A!: {TOKEN}", f"A: {TOKEN}\r", f"A: {TOKEN}\nB: c", f"A: {TOKEN}é")
"""Headers that HTTP or gRPC cannot send."""


def requests_of(extensions: tuple[str, ...], **fields: Any) -> list[Request]:
    """The requests that a check sends to a server with these extensions; it passes."""
    requests: list[Request] = []
    with serving_http(extensions=extensions, requests=requests) as url:
        assert check(request_for(url, **fields), timer=EQUAL_TIMES).passed
    return requests


@pytest.mark.parametrize("extensions", [(), ("model_repository",), (BINARY,), ("classification", BINARY)])
def test_tensors_are_bytes_only_where_the_server_lists_it(extensions: tuple[str, ...]) -> None:
    requests = requests_of(extensions)
    assert requests
    for request in requests:
        assert request.is_binary == (BINARY in extensions)
        if not request.is_binary:
            assert isinstance(request.body["inputs"][0]["data"], list)
            assert [output["name"] for output in request.body["outputs"]] == ["y"]
            assert "binary_data_output" not in request.body.get("parameters", {})


@pytest.mark.parametrize("extensions", [(), (BINARY,)])
def test_requests_are_compressed_on_request(extensions: tuple[str, ...]) -> None:
    assert {request.encoding for request in requests_of(extensions)} == {None}
    assert {request.encoding for request in requests_of(extensions, gzip=True)} == {"gzip"}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"error": "unknown dtype FP33"}, "unknown dtype FP33"),
        ({"detail": "field required"}, "field required"),
        (b"<h1>Bad gateway</h1>", "<h1>Bad gateway</h1>"),
    ],
)
@pytest.mark.parametrize("status", [400, 422, 500, 502])
def test_the_text_of_the_server_is_shown(body: Any, text: str, status: int) -> None:
    with serving_http(small=lambda x: body, status=status) as url, pytest.raises(ServerError) as error:
        check(request_for(url), timer=EQUAL_TIMES)
    assert text in str(error.value)
    assert "exception" not in str(error.value)
    refused = status in (400, 422)
    assert error.value.code is (ErrorCode.REQUEST_REFUSED if refused else ErrorCode.SERVER_ERROR)


def test_inputs_are_named_where_their_shape_is_at_fault(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros((2, 5), np.float32))
    with serving_http(small=lambda x: {"error": "no"}, status=400) as url:
        model = TritonModel(request_for(url), "small")
        request = model.encode({"x": np.zeros((4, 5), np.float32)})
        with pytest.raises(InputError) as error:
            model.call(request)
    assert error.value.code is ErrorCode.REQUEST_REFUSED
    assert str([4, 5]) in str(error.value)


@pytest.fixture
def denying(tmp_path: Path) -> Any:
    with serving_http(headers={"Authorization": f"Bearer {TOKEN}"}) as url:
        yield url


def test_a_header_is_sent_and_written_nowhere(denying: str, tmp_path: Path, capfd: Cap) -> None:
    files = {name: tmp_path / f"{name}.json" for name in ("save-baseline", "history", "junit")}
    flags = [part for name, path in files.items() for part in (f"--{name}", path)]
    models = ["--server", denying, "--model", "dense", "--baseline", "dense", "--seconds", "0.2"]
    result = compress(capfd, "check", *models, "--max-slowdown", "1000%", "--header", HEADER, *flags, "--json")
    assert result.code == 0, result.err
    for text in (result.out, result.err, *(path.read_text() for path in files.values())):
        assert TOKEN not in text
    assert json.loads(files["save-baseline"].read_text())
    assert TOKEN not in repr(request_for(denying, header=HEADER))


@pytest.mark.parametrize("header", [(), f"Authorization: Bearer {TOKEN}x"])
def test_a_server_that_denies_access_is_no_fault_of_the_inputs(header: Any, denying: str) -> None:
    with pytest.raises(ServerError) as error:
        check(request_for(denying, header=header), timer=EQUAL_TIMES)
    assert error.value.code is ErrorCode.ACCESS_DENIED
    assert TOKEN not in "".join(traceback.format_exception(error.value))


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"header": TOKEN}, ErrorCode.INVALID_VALUE),
        ({"header": ["A: b", f"{TOKEN}: "]}, ErrorCode.INVALID_VALUE),
        *(({"header": [HEADER, header]}, ErrorCode.INVALID_VALUE) for header in UNSENDABLE),
        ({"header": HEADER, "headers": HEADER}, ErrorCode.UNKNOWN_NAME),
        ({"headers": HEADER}, ErrorCode.UNKNOWN_NAME),
        ({"certificate": "ca.pem"}, ErrorCode.CONTRADICTION),
        ({"server": None, "header": HEADER}, ErrorCode.CONTRADICTION),
        ({"server": None, "gzip": True}, ErrorCode.CONTRADICTION),
    ],
)
def test_settings_of_a_connection_are_checked(fields: dict[str, Any], code: ErrorCode) -> None:
    with pytest.raises(UsageError) as error:
        CheckRequest(**{"model": "small", "baseline": "dense", "server": "http://127.0.0.1:1", **fields})
    assert error.value.code is code
    assert TOKEN not in str(error.value)
    assert TOKEN not in repr(error.value.__cause__)
    assert TOKEN not in str(error.value.details)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate that signs itself, with its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    folder = tmp_path_factory.mktemp("certificate")
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    files: list[str | Path] = ["-keyout", folder / "key.pem", "-out", folder / "certificate.pem"]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names, *files],
        check=True,
        capture_output=True,
    )
    both = folder / "both.pem"
    both.write_text((folder / "key.pem").read_text() + (folder / "certificate.pem").read_text())
    return both


def test_a_private_certificate_is_trusted_where_it_is_named(certificate: Path) -> None:
    with serving_http(certificate=certificate) as url:
        assert url.startswith("https://")
        request = request_for(url, certificate=certificate.with_name("certificate.pem"))
        assert check(request, timer=EQUAL_TIMES).passed
        with pytest.raises(ServerError) as error:
            check(request_for(url), timer=EQUAL_TIMES)
    assert error.value.code is ErrorCode.CERTIFICATE_UNTRUSTED


@pytest.mark.parametrize(("content", "code"), [("", ErrorCode.FILE_UNREADABLE), (None, ErrorCode.FILE_MISSING)])
def test_a_file_without_certificates_is_refused(content: str | None, code: ErrorCode, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "ca.pem").write_text(content)
    with pytest.raises(InputError) as error:
        check(request_for("https://127.0.0.1:1", certificate=tmp_path / "ca.pem"), timer=EQUAL_TIMES)
    assert error.value.code is code


def test_a_server_over_grpc_gets_headers_too() -> None:
    with serving(headers={"authorization": f"Bearer {TOKEN}"}) as url:
        assert check(request_for(url, header=HEADER, gzip=True), timer=EQUAL_TIMES).passed
        with pytest.raises(ServerError) as error:
            check(request_for(url), timer=EQUAL_TIMES)
    assert error.value.code is ErrorCode.ACCESS_DENIED


def test_a_private_certificate_is_trusted_over_grpc_too(certificate: Path) -> None:
    public = certificate.with_name("certificate.pem")
    with serving(certificate=public) as url:
        assert url.startswith("grpcs://")
        assert check(request_for(url, certificate=public), timer=EQUAL_TIMES).passed
        with pytest.raises(ServerError) as error:
            check(request_for(url), timer=EQUAL_TIMES)
    assert error.value.code in (ErrorCode.CERTIFICATE_UNTRUSTED, ErrorCode.SERVER_UNREACHABLE)
