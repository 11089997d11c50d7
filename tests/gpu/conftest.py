"""Fixtures of the GPU tests, and the record of their measurements."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.recording import Note, recorded

import sdonnx

Build = Callable[[str], tuple[Path, Path]]
Made = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def note(request: pytest.FixtureRequest) -> Iterator[Note]:
    """Return a function that records measurements under a title, in the file of --results."""
    with recorded("tests/gpu", request.config.getoption("--results")) as take:
        yield take


def _code() -> str:
    """Return a hash of the project's modules."""
    digest = hashlib.sha256()
    for path in sorted(Path(sdonnx.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@pytest.fixture(scope="session")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return a function that returns a folder by name, which another function fills once for a session.

    With --made, later sessions use it too, until the project's modules change.
    """
    kept: Path | None = request.config.getoption("--made")
    folders: dict[str, Path] = {}

    def make(name: str, fill: Callable[[Path], object]) -> Path:
        if name not in folders:
            work = tmp_path_factory.mktemp(name) if kept is None else kept / name
            code = work / "code"
            if not code.is_file() or code.read_text() != _code():  # other code made it
                shutil.rmtree(work, ignore_errors=True)
                fill(work)
                code.write_text(_code())
            folders[name] = work
        return folders[name]

    return make


@pytest.fixture(scope="session")
def build(made: Made) -> Build:
    """Return a function that writes a sample and optimizes it to fp16, once, and returns both folders."""
    from sdonnx.export.export_pipeline import export_pipeline
    from sdonnx.optimize.optimizer import optimize_folder
    from sdonnx.sample.architecture import ADAPTER_FILES
    from sdonnx.sample.write_sample import write_sample

    def make(arch: str) -> tuple[Path, Path]:
        def fill(work: Path) -> None:
            write_sample(arch, work / "source")
            folder = work / "source" / "ip_adapter"
            adapters = [folder / name for name in ADAPTER_FILES if (folder / name).is_file()]
            export_pipeline(work / "source", work / "onnx", ip_adapters=adapters)
            optimize_folder(work / "onnx", work / "fp16", float16=True)

        work = made(arch, fill)
        return work / "source", work / "fp16"

    return make
