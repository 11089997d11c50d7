"""The page at `/`, in a real browser: an image with its progress, an edit, LoRAs and control images, a stop, errors."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.control_networks import picture, write_controlnet
from support.pipeline_cache import PipelineCache
from support.plain_lora import write_plain_lora
from support.serve_load import CAPTIONS
from support.serving import Running, serving, serving_folder, until

from sdonnx import AsyncPipeline, ServeLimits
from sdonnx.serve.prometheus_metrics import PrometheusMetrics
from sdonnx.serve.serve_settings import ServeSettings

browser_support = pytest.importorskip("support.browser")

pytestmark = pytest.mark.skipif(browser_support.CHROMIUM is None, reason="no Chromium")

KEY = "secret"


@pytest.fixture(scope="module")
def server(shapes_cpu: Path) -> Iterator[Running]:
    with serving_folder(shapes_cpu, ServeLimits(max_images=4), ServeSettings(api_keys=(KEY,))) as running:
        running.client.headers["Authorization"] = f"Bearer {KEY}"
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browser_support.chromium() as launched:
        yield launched


@pytest.fixture
def page(server: Running, browser: Any) -> Iterator[Any]:
    """The page with the API key entered; scripts and styles come from the server only, and none fails."""
    context = browser.new_context(viewport={"width": 390, "height": 844})
    context.set_default_timeout(60_000)
    opened = context.new_page()
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("request", lambda request: problems.append(request.url) if server.url not in request.url
              and not request.url.startswith("data:") else None)  # fmt: skip
    opened.goto(server.url)
    opened.fill("#key", KEY)
    opened.locator("#key").dispatch_event("change")
    opened.wait_for_selector("#model option", state="attached")
    yield opened
    context.close()
    assert problems == []


def test_generates_images_with_previews(page: Any) -> None:
    page.fill("#prompt", CAPTIONS[1])
    page.fill("#n", "2")
    page.fill("#num_inference_steps", "30")
    page.fill("#seed", "4")
    page.fill("#size", "64x48")
    page.click("#start")
    page.wait_for_selector("figure[data-state=preview]")
    page.wait_for_selector("figure[data-state=completed] >> nth=1")
    assert page.locator("#status").inner_text() == "done"
    assert page.locator("figcaption").all_inner_texts() == ["64x48, seed 4", "64x48, seed 5"]
    sizes = page.evaluate("[...document.images].map((each) => [each.naturalWidth, each.naturalHeight, each.alt])")
    assert sizes == [[64, 48, CAPTIONS[1]]] * 2
    assert page.evaluate("document.querySelector('#progress').value") == 1
    assert page.locator("#start").is_enabled()


def test_edits_an_image(page: Any) -> None:
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(file, "PNG")
    page.set_input_files("#image", {"name": "a.png", "mimeType": "image/png", "buffer": file.getvalue()})
    page.fill("#num_inference_steps", "4")
    page.fill("#strength", "0.5")
    page.click("#start")
    page.wait_for_selector("figure[data-state=completed]")


def test_stop_ends_the_image_on_the_server(server: Running, page: Any) -> None:
    before = server.value("sdonnx_requests_total", model="shapes", outcome="cancelled")
    page.fill("#num_inference_steps", "150")
    page.click("#start")
    page.wait_for_selector("#status:has-text('step')")
    page.click("#stop")
    page.wait_for_selector("#status:has-text('stopped')")
    until(lambda: server.value("sdonnx_requests_total", model="shapes", outcome="cancelled") == before + 1)


def test_shows_errors_as_text(page: Any) -> None:
    page.fill("#prompt", "<img src=x onerror=alert(1)>")
    page.fill("#scheduler", "<b>nothing</b>")
    page.click("#start")
    page.wait_for_selector("#status.error")
    assert "<b>nothing</b>" in page.locator("#status").inner_text()
    page.fill("#key", "wrong")
    page.click("#start")
    page.wait_for_selector("#status:has-text('API key')")


def png_of(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def conditioned(
    pipelines: PipelineCache, micro_cpu: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """A model with two ControlNets and one without, and two LoRAs."""
    source, work = pipelines.micro(), tmp_path_factory.mktemp("page")
    nets = [write_controlnet(source, work / f"net-{seed}", seed) for seed in (1, 2)]
    folder = pipelines.optimized(pipelines.exported(source, controlnets=nets), provider="cpu")
    loras = {name: write_plain_lora(micro_cpu, work / f"{name}.safetensors", 0) for name in ("style", "<b>face</b>")}
    metrics = PrometheusMetrics()
    models = {"controlled": folder, "plain": micro_cpu}
    queue = AsyncPipeline.from_pretrained(models, observer=metrics, loras=loras)
    with serving(queue, metrics, ServeSettings()) as running:
        yield running


@pytest.mark.parametrize("edits", [False, True])
def test_sends_loras_and_control_images(conditioned: Running, browser: Any, edits: bool) -> None:
    pictures = [png_of(picture(seed, (48, 64))) for seed in range(3)]
    context = browser.new_context(viewport={"width": 390, "height": 844})
    page = context.new_page()
    page.goto(conditioned.url)
    page.wait_for_selector("#loras .row")
    assert page.locator("#loras option").all_inner_texts() == ["none", "style", "<b>face</b>"]
    assert page.locator("#adapter_image, #ip_adapter_image").evaluate_all("all => all.every((each) => each.hidden)")
    page.select_option("#loras select", "style")
    page.fill("#loras [data-part=weight] >> nth=0", "0.5")
    page.wait_for_selector("#loras .row >> nth=1")
    for index, content in enumerate(pictures[:2]):
        file = {"name": "a.png", "mimeType": "image/png", "buffer": content}
        page.set_input_files(f"#control_image input[type=file] >> nth={index}", file)
    page.wait_for_selector("#control_image .row >> nth=2")
    page.fill("#control_image [data-part=weight] >> nth=1", "0.25")
    assert page.locator("#control_image [data-part=type]").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert browser_support.find_cut(page) == []
    fields: dict[str, Any] = {"prompt": "a fox", "size": "48x64", "num_inference_steps": 2, "seed": 4}
    for name, value in fields.items():
        page.fill(f"#{name}", str(value))
    if edits:
        page.set_input_files("#image", {"name": "i.png", "mimeType": "image/png", "buffer": pictures[2]})
    page.click("#start")
    page.wait_for_selector("figure[data-state=completed]")
    found = page.locator("figure img").get_attribute("src").partition(",")[2]
    sent = {**fields, "loras": '{"style": 0.5}', "controlnet_conditioning_scale": [1, 0.25]}
    if edits:
        files = [("image", pictures[2]), *(("control_image", content) for content in pictures[:2])]
        answer = conditioned.client.post("/v1/images/edits", data=sent, files=files)
    else:
        texts = [base64.b64encode(content).decode() for content in pictures[:2]]
        sent |= {"loras": {"style": 0.5}, "control_image": texts}
        answer = conditioned.client.post("/v1/images/generations", json=sent)
    assert answer.status_code == 200, answer.text
    assert found == answer.json()["data"][0]["b64_json"]
    page.select_option("#model", "plain")
    assert page.locator("#control_image").is_hidden()
    page.click("#start")
    page.wait_for_selector("#status:has-text('done')")
    context.close()


def test_lists_the_inputs_of_models(conditioned: Running, server: Running) -> None:
    listed = conditioned.client.get("/v1/models").json()["data"]
    assert {each["id"]: each["inputs"] for each in listed} == {"controlled": ["control_image"], "plain": []}
    assert server.client.get("/v1/models/shapes").json()["inputs"] == []


def test_fits_narrow_windows_and_can_be_read(page: Any, browser: Any, server: Running) -> None:
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert browser_support.find_cut(page) == []
    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme)
        shown = context.new_page()
        shown.goto(server.url)
        contrasts = shown.evaluate(browser_support.CONTRASTS)
        context.close()
        assert {name: ratio for name, ratio in contrasts.items() if ratio < 4.5} == {}
