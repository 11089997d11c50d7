"""Requests that cannot be served: each is answered by one sentence with a status below 500, and the server goes on."""

from __future__ import annotations

import json
import socket
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from support.serving import Running, file_of, serving_folder

from sdonnx import ServeLimits
from sdonnx.errors import OptionError
from sdonnx.serve.http.uploaded_images import read_upload
from sdonnx.serve.serve_settings import ServeSettings, read_api_keys

LIMITS = ServeLimits(max_images=2, max_pixels=128 * 128, max_steps=3, batch_wait_ms=0)
MAX_BODY = 1024 * 1024
GOOD: dict[str, Any] = {"prompt": "a circle", "num_inference_steps": 1, "size": "64x64"}
FIELDS = (
    "prompt", "model", "n", "size", "response_format", "output_format", "output_compression", "background", "stream",
    "partial_images", "quality", "style", "user", "negative_prompt", "seed", "num_inference_steps", "guidance_scale",
    "scheduler", "stream_progress", "unknown",
)  # fmt: skip
PATHS = ("/v1/images/generations", "/v1/images/edits")
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=30)
    | st.sampled_from([10**400, "1e999"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
SLOW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def server(shapes_cpu: Path) -> Iterator[Running]:
    limited = ServeSettings(max_body_bytes=MAX_BODY, body_timeout_s=1, max_upload_pixels=256 * 256)
    with serving_folder(shapes_cpu, LIMITS, limited) as running:
        yield running
        assert running.pipeline.failure is None
        assert running.post(**GOOD).status_code == 200


def answered(response: httpx.Response) -> int:
    """Return the status, after a look at the form of an error."""
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        message = error["message"]
        assert message.isprintable()
        assert 5 < len(message) < 3000
        assert "Traceback" not in message
    return response.status_code


def send(server: Running, content: bytes, path: str = PATHS[0], kind: str = "application/json") -> int:
    return answered(server.client.post(path, content=content, headers={"Content-Type": kind}))


PNG = file_of(Image.new("RGB", (64, 64), "red"))


@SLOW
@given(st.sampled_from(FIELDS), VALUES)
def test_any_value_of_a_field(server: Running, name: str, value: Any) -> None:
    send(server, json.dumps({**GOOD, name: value}).encode())


@SLOW
@given(VALUES)
def test_any_json(server: Running, value: Any) -> None:
    assert send(server, json.dumps(value).encode()) in (400, 422)


@SLOW
@given(
    st.sampled_from(PATHS), st.binary(max_size=300), st.sampled_from(["application/json", "multipart/form-data", ""])
)
def test_any_bytes(server: Running, path: str, content: bytes, kind: str) -> None:
    assert send(server, content, path, kind) in (400, 422)


@SLOW
@given(st.binary(max_size=200), st.sampled_from(["image", "mask", "image[]", "prompt", "n", "other"]))
def test_any_form(server: Running, content: bytes, name: str) -> None:
    files = {"image": ("a.png", PNG), name: ("b.png", content)}
    status = answered(server.client.post(PATHS[1], data={"prompt": "a circle"}, files=files))
    assert status in (400, 422)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the body is required"),
        (b"[1]", "the body is no JSON object; send one with the header content-type: application/json"),
        (b"{", "no valid JSON"),
        (b"[" * 100_000, ""),
        (b'{"prompt":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001, ""),
        (b'{"prompt": "a", "guidance_scale": NaN}', "guidance_scale"),
        (b'{"prompt": "a", "guidance_scale": 1e999}', "guidance_scale"),
        (b'{"prompt": "a", "guidance_scale": "7"}', "guidance_scale"),
        (b'{"prompt": "a", "seed": ' + b"9" * 10_000 + b"}", ""),
        (b'{"prompt": "a", "n": true}', "n: "),
        (b'{"prompt": "a", "n": 1e3}', "n: "),
        (b'{"prompt": "\\ud800"}', "prompt"),
        (b'{"prompt": "\xff"}', ""),
        (b'{"prompt": "a", "' + b"x" * 100_000 + b'": 1}', "is not a parameter"),
        (b'{"prompt": "' + b"x" * 20_000 + b'"}', "20000 characters"),
        (b'{"prompt": "a", "model": "/etc/passwd"}', "the model is unknown"),
        (b'{"prompt": "a", "image": "http://127.0.0.1/a.png"}', "image: is not a parameter"),
        (b'{"prompt": "a", "size": "65536x65536"}', "height is 65536"),
        (b'{"prompt": "a", "size": "0x64"}', "size is '0x64'"),
        (b'{"prompt": "a", "size": "1x1", "num_inference_steps": 1}', "height is 1; expected a multiple of 4"),
        (b'{"prompt": "a", "size": "64x2", "num_inference_steps": 1}', "height is 2; expected a multiple of 4"),
        (b'{"prompt": "a", "response_format": "url"}', "the server keeps no files"),
    ],
)
def test_bodies_that_cannot_be_used(server: Running, content: bytes, words: str) -> None:
    response = server.client.post(PATHS[0], content=content, headers={"Content-Type": "application/json"})
    assert answered(response) in (400, 404, 422)
    assert words in response.json()["error"]["message"]


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(width: int, height: int) -> bytes:
    """Return a small PNG that decodes to many pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress(bytes(1000 * (width + 1) if width < 10**5 else 1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def text_bomb() -> bytes:
    """Return a PNG with compressed text that is larger than Pillow accepts."""
    text = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(70 * 1024 * 1024)))
    return PNG[:33] + text + PNG[33:]


BROKEN = {
    "empty": b"",
    "text": b"no image",
    "truncated": PNG[: len(PNG) // 2],
    "bomb of 300x300": bomb(300, 300),
    "bomb of 20000x20000": bomb(20_000, 20_000),
    "bomb of 2**31": bomb(2**31 - 1, 2**31 - 1),
    "compressed text": text_bomb(),
    "gif": file_of(Image.new("P", (64, 64)), "GIF"),
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "path": b"/etc/passwd",
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("name", ["image", "mask"])
def test_broken_images(server: Running, kind: str, name: str) -> None:
    files = {"image": ("a.png", PNG)} | {name: ("../../a.png", BROKEN[kind])}
    response = server.client.post(PATHS[1], data={"prompt": "a circle"}, files=files)
    assert answered(response) == 422
    assert response.json()["error"]["message"].startswith(name)


@pytest.mark.parametrize(
    ("data", "names", "words"),
    [
        ({}, ["image"], "prompt: is required"),
        ({"prompt": "a"}, [], "image"),
        (
            {"prompt": "a"},
            ["image", "image[]"],
            "2 files named image; expected one, since models of this server start from one image",
        ),
        ({"prompt": "a", "image": "http://127.0.0.1/a.png"}, [], "addresses are not opened"),
        ({"prompt": "a", "n": "many"}, ["image"], "n: "),
        ({"prompt": "a", "strength": "nan"}, ["image"], "strength: "),
        ({"prompt": "a", "strength": "2"}, ["image"], "strength: "),
        ({"prompt": "a", "size": "4096x4096"}, ["image"], "at most"),
        ({"prompt": "a", "x": "1"}, ["image"], "x: is not a parameter"),
    ],
)
def test_forms_that_cannot_be_used(server: Running, data: dict[str, str], names: list[str], words: str) -> None:
    files: Any = [(name, ("a.png", PNG)) for name in names] or [("ignored", ("a.png", PNG))]
    response = server.client.post(PATHS[1], data=data, files=files)
    assert answered(response) in (400, 422)
    if names:
        assert words in response.json()["error"]["message"]


def test_mask_of_another_size() -> None:
    with pytest.raises(OptionError, match="the mask is 32x32 and the image 64x64"):
        read_upload(PNG, file_of(Image.new("L", (32, 32))), None, 10**6)


def test_large_bodies_are_refused_before_they_are_read(server: Running) -> None:
    def chunks() -> Iterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
        for _ in range(40):
            yield b"x" * 100_000

    headers = {"Content-Type": "application/json"}
    response = server.client.post(PATHS[0], content=b"x" * (MAX_BODY + 1), headers=headers)
    assert answered(response) == 413
    response = server.client.post(
        PATHS[1], content=chunks(), headers={"Content-Type": "multipart/form-data; boundary=x"}
    )
    assert answered(response) == 413


def raw(server: Running, content: bytes, *, close: bool = False) -> bytes:
    """Send bytes and return the answer, if the connection is not closed first."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(content)
        return b"" if close else connection.recv(65536)


HEAD = b"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (HEAD + b'Content-Length: 100\r\n\r\n{"prompt', b"408"),  # a slow client
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n", b"408"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nnot hexadecimal\r\n", b"400"),
        (HEAD + b"Content-Length: -5\r\n\r\n", b"400"),
        (HEAD + b"Content-Length: 99999999999999999999\r\n\r\n", b"4"),
        (b"NONSENSE\r\n\r\n", b"400"),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", b"4"),
        (b"DELETE /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", b"405"),
    ],
)
def test_half_and_malformed_requests(server: Running, content: bytes, status: bytes) -> None:
    assert raw(server, content).split(b" ")[1].startswith(status)


def test_connections_that_end_early(server: Running) -> None:
    for end in (1, 20, len(HEAD), len(HEAD) + 10):
        raw(server, (HEAD + b'Content-Length: 100\r\n\r\n{"prompt"')[:end], close=True)
    assert server.post(**GOOD).status_code == 200


@pytest.mark.parametrize("path", ["/v1", "/v1/images", "/../etc/passwd", "/v1/models/%00", "/try.js/../x", "/docs"])
def test_unknown_paths(server: Running, path: str) -> None:
    assert answered(server.client.get(path)) == 404


@pytest.mark.parametrize("path", ["/v1/images/variations", "/v1/chat/completions"])
def test_endpoints_of_openai_that_are_not_offered(server: Running, path: str) -> None:
    response = server.client.post(path, json={"prompt": "a"})
    assert answered(response) == 404
    message = response.json()["error"]["message"]
    assert message.startswith(f"POST {path} is not part of this server; expected POST /v1/images/generations")


def test_files_of_keys_that_cannot_be_used(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n \n")
    for file, words in ((tmp_path / "missing", "cannot be read"), (empty, "has no keys"), (tmp_path, "cannot be read")):
        with pytest.raises(OptionError, match=words):
            read_api_keys(file, None)
