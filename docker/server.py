"""A small server: POST /generate returns a PNG, GET /health says whether the process can serve."""

import io
import logging
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Body, FastAPI, HTTPException, Response

from sdonnx import DeviceMemoryError, OrtDiffusionPipeline, SdonnxError

SIZES = [(1, 512, 512)]  # batch, height, width: captured before the first request
MAX_STEPS, MAX_PIXELS, MAX_WAITING = 100, 1024 * 1024, 16


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Load the pipeline before the server listens, and release it at the end."""
    with OrtDiffusionPipeline.from_pretrained(os.environ["MODEL"], max_sizes=4) as pipeline:
        pipeline.set_progress_bar_config(disable=True)
        pipeline.warmup(SIZES)
        app.state.pipeline, app.state.broken = pipeline, False
        app.state.places = threading.Semaphore(MAX_WAITING)
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/health")
async def health() -> dict[str, str]:  # async: it answers even if all threads wait for an image
    """Answer 503 after a failure that a restart may fix, such as a lost GPU."""
    if app.state.broken:
        raise HTTPException(503, "an earlier request failed unexpectedly")
    return {"status": "ok"}


@app.post("/generate")
def generate(  # not async: FastAPI runs it in a thread, and the pipeline queues the calls of several threads
    prompt: Annotated[str, Body(max_length=2000)],
    negative_prompt: Annotated[str | None, Body(max_length=2000)] = None,
    height: Annotated[int, Body()] = 512,
    width: Annotated[int, Body()] = 512,
    steps: Annotated[int, Body()] = 30,
    seed: Annotated[int | None, Body()] = None,
) -> Response:
    """Return an image as PNG, with its seed in the header X-Seed."""
    if steps > MAX_STEPS or height * width > MAX_PIXELS:
        raise HTTPException(422, f"expected at most {MAX_STEPS} steps and {MAX_PIXELS} pixels")
    if not app.state.places.acquire(blocking=False):
        raise HTTPException(503, "too many requests are waiting")
    try:
        output = app.state.pipeline(
            prompt, height, width, num_inference_steps=steps, negative_prompt=negative_prompt, seed=seed
        )
    except DeviceMemoryError as error:
        raise HTTPException(503, str(error)) from error
    except SdonnxError as error:  # the request cannot be served: one line says why
        raise HTTPException(422, str(error)) from error
    except Exception:
        logging.exception("a request failed")
        app.state.broken = True
        raise
    finally:
        app.state.places.release()
    file = io.BytesIO()
    output.images[0].save(file, "PNG")
    return Response(file.getvalue(), media_type="image/png", headers={"X-Seed": str(output.seed)})
