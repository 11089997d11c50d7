"""What the GPU tests share: the marker, and the record of what they measured."""

from __future__ import annotations

import functools
import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from recording import Note, recorded

import sdonnx

Build = Callable[[str], tuple[Path, Path]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def note(request: pytest.FixtureRequest) -> Iterator[Note]:
    """Take measurements under a title; they are written to the file that --results names."""
    with recorded("tests/gpu", request.config.getoption("--results")) as take:
        yield take


def _code() -> str:
    """Return what tells one state of the project's modules from another."""
    digest = hashlib.sha256()
    for path in sorted(Path(sdonnx.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@pytest.fixture(scope="session")
def build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Make a sample of an architecture and optimize it to fp16, with its adapters, once; return both folders."""
    kept: Path | None = request.config.getoption("--made")
    from sdonnx.export.pipeline import export_pipeline
    from sdonnx.optimize import optimize_folder
    from sdonnx.sample import write_sample
    from sdonnx.sample.adapters import FILES

    @functools.cache
    def make(arch: str) -> tuple[Path, Path]:
        work = tmp_path_factory.mktemp(arch) if kept is None else kept / arch
        code = work / "code"
        if code.is_file() and code.read_text() == _code():
            return work / "source", work / "fp16"
        shutil.rmtree(work, ignore_errors=True)  # other code made it
        write_sample(arch, work / "source")
        folder = work / "source" / "ip_adapter"
        adapters = [folder / name for name in FILES if (folder / name).is_file()]
        export_pipeline(work / "source", work / "onnx", ip_adapters=adapters)
        optimize_folder(work / "onnx", work / "fp16", float16=True)
        code.write_text(_code())
        return work / "source", work / "fp16"

    return make
