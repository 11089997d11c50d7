"""No field of a request is opened as a path or an address: an audit hook (PEP 578) watches while requests are read."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
from typing import Any

import httpx
from fastapi import FastAPI
from PIL import Image
from support.fake_service import FakeService

from sdonnx.serve.http.application import create_app
from sdonnx.serve.http.request_fields import EditFields, GenerationFields
from sdonnx.serve.prometheus_metrics import PrometheusMetrics
from sdonnx.serve.serve_settings import ServeSettings

PLACES = ("/etc/passwd", "file:///etc/passwd", "http://127.0.0.1:9/a.png", "../../etc/passwd")
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
EVENTS = ("open", "socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system", "pickle.find_class")


async def send_all(app: FastAPI) -> list[int]:
    """Send each place in each field, in JSON and in a form, as a file's name and as its content."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    image = ("/etc/passwd", file.getvalue())
    transport = httpx.ASGITransport(app)
    statuses = []
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for place in PLACES:
            for name in GenerationFields.model_fields:
                fields: dict[str, Any] = {"prompt": "a", name: place}
                statuses.append((await client.post("/v1/images/generations", json=fields)).status_code)
            for name in EditFields.model_fields:
                data = {"prompt": "a", name: place}
                sent = await client.post("/v1/images/edits", data=data, files={"image": image})
                statuses.append(sent.status_code)
            for name in ("image", "mask", "control_image"):
                files = {"image": image, name: (place, place.encode())}
                statuses.append((await client.post("/v1/images/edits", data={"prompt": "a"}, files=files)).status_code)
            statuses.append((await client.get(f"/v1/models/{place}")).status_code)
    return statuses


def main() -> None:
    """Print the statuses, and the events of a second pass; the first one imports and opens what the libraries need."""
    app = create_app(FakeService(), PrometheusMetrics(), ServeSettings())
    statuses = asyncio.run(send_all(app))
    seen: list[str] = []
    sys.addaudithook(lambda event, arguments: seen.append(f"{event} {arguments!r:.200}") if event in EVENTS else None)
    asyncio.run(send_all(app))
    print(json.dumps([statuses, seen]))


def test_no_field_is_opened() -> None:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=ENVIRONMENT, timeout=300)
    assert done.returncode == 0, done.stderr
    statuses, events = json.loads(done.stdout)
    assert events == []
    assert set(statuses) == {200, 404, 422}
    assert len(statuses) > 100


if __name__ == "__main__":
    main()
