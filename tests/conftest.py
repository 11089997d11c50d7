"""Options, markers and fixtures of the whole session."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cores import keep_to_own_cores

# Both are read when libraries are imported: threads by torch, and that no test may use a network by huggingface_hub.
keep_to_own_cores()
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["SDONNX_CACHE_LIMIT"] = "0"  # tests of the cache turn it on, in folders of their own

from support import call_budget  # noqa: E402
from support.committed_graphs import MODE, replay_exports  # noqa: E402
from support.diffusers_pipelines import in_diffusers  # noqa: E402
from support.pipeline_cache import PipelineCache, cache_root  # noqa: E402
from support.recording import Note, recorded  # noqa: E402

replay_exports()
if "PYTEST_XDIST_WORKER" in os.environ:  # the controller starts to count before it starts the workers
    call_budget.count_calls()

# pytest adds its handlers to loggers that do not propagate. With any handler, torch writes a record for each step of a
# trace, which is 6 % of an export.
logging.getLogger("torch.__trace").propagate = True

# Python's defaults, 700 new objects and 10 collections of each generation, cost 13 % of the tests that export graphs.
gc.set_threshold(20_000, 20, 10)

# Folders and files with tests that take seconds each without a fixture that says so: they request pipelines by name,
# start processes, or compare many cases.
_SLOW = (
    "kernels/test_emulated_kernels",
    "models/",
    "sample/",
    "benchmark/test_adapter_engines",
    "benchmark/test_benchmark_command",
    "benchmark/test_one_command",
    "benchmark/test_report",
    "html/test_report_browser",
    "cli/",
    "compiler/",
    "export/test_decomposition",
    "export/test_repeated_blocks",
    "export/test_simplify",
    "doctor/test_doctor_command",
    "doctor/test_kernel_case_file",
    "folder/test_faults",
    "folder/test_hostile",
    "optimize/test_mutations",
    "optimize/test_work",
    "precision_search/",
    "runtime/test_captions",
    "samplers/test_sampler_options",
    "samplers/test_sampler_steps",
    "verify/",
    "fusions/test_channels_last_nets",
    "test_docs",
    "test_examples",
    "test_packaging",
)

# They take half a minute to two minutes each, so they start before the other slow files: the workers end together.
_LONGEST = (
    "optimize/test_exporters",
    "precision_search/",
    "benchmark/test_benchmark_command",
    "models/test_ip_adapter",
    "folder/test_faults",
    "folder/test_hostile",
    "benchmark/test_adapter_engines",
    "compose/test_abi",
    "optimize/test_flags",
    "optimize/test_reproducible",
    "kernels/",
    "optimize/test_compare_optimizers",
)

_WEEKLY = pytest.StashKey[frozenset[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--weekly", action="store_true", help="also run the tests of full-size models and further cases")
    parser.addoption("--results", type=Path, default=None, help="file to append measurements to")
    parser.addoption("--made", type=Path, default=None, help="keep GPU tests' pipelines here, and use those that are")
    parser.addoption("--faults", type=int, default=0, help="number of injections of each fault")
    parser.addoption("--hostile", type=int, default=0, help="number of hostile inputs of each kind")
    parser.addoption("--calls", type=int, default=60, help="number of random calls that are compared with diffusers")
    parser.addoption("--seed", type=int, default=0, help="of the faults, the hostile inputs and the random calls")


def pytest_configure(config: pytest.Config) -> None:
    """Start to count exports, optimizations and compilations, in this process or its workers."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    folder = tempfile.TemporaryDirectory(prefix="sdonnx-calls-")
    config.add_cleanup(folder.cleanup)
    call_budget.start_counting(Path(folder.name, "calls"))
    call_budget.count_calls()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that exceeds the budget of calls."""
    if "PYTEST_XDIST_WORKER" not in os.environ and _table_of_calls(session.config)[1] and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the calls by test file."""
    table, over = _table_of_calls(config)
    for line in table:
        terminalreporter.write_line(line)
    for line in over:
        terminalreporter.write_line(line, red=True)


def _table_of_calls(config: pytest.Config) -> tuple[list[str], list[str]]:
    calls = call_budget.counted_calls(Path(os.environ[call_budget.COUNTS]))
    table, over = call_budget.report(calls, call_budget.BUDGET)
    unlimited = config.getoption("--weekly") or os.environ.get(MODE)  # further cases, or each graph is exported
    return table if calls else [], [] if unlimited else over


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect `weekly` unless requested, skip `gpu` without CUDA, mark tests that take long, and put fast files first.

    A `-m` in addopts would be lost as soon as the command line has one, hence a hook.
    """
    tests = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(tests / "gpu"):
            item.add_marker(pytest.mark.gpu)
        if "pipelines" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.pipeline)
        elif item.path.relative_to(tests).as_posix().startswith(_SLOW):
            item.add_marker(pytest.mark.slow)
    weekly = [item for item in items if item.get_closest_marker("weekly")]
    config.stash[_WEEKLY] = frozenset(
        item.nodeid.partition("[")[0] for item in weekly if not item.get_closest_marker("gpu")
    )
    if not config.getoption("--weekly"):
        config.hook.pytest_deselected(items=weekly)
        items[:] = [item for item in items if not item.get_closest_marker("weekly")]
    heavy = {item.path for item in items if _takes_long(item)}
    ranks = {path: _rank(path.relative_to(tests).as_posix()) for path in heavy}
    items.sort(key=lambda item: ranks.get(item.path, -1))  # stable: the order within a file stays
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_cuda():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="ONNX Runtime has no CUDAExecutionProvider here"))


def _takes_long(item: pytest.Item) -> bool:
    return item.get_closest_marker("pipeline") is not None or item.get_closest_marker("slow") is not None


def _rank(file: str) -> int:
    """Return the place of a file among those that take long."""
    return next((index for index, start in enumerate(_LONGEST) if file.startswith(start)), len(_LONGEST))


def pytest_collection_finish() -> None:
    """Leave the objects of the collected tests to no later garbage collection."""
    gc.collect()
    gc.freeze()


def _has_cuda() -> bool:
    import onnxruntime

    return "CUDAExecutionProvider" in onnxruntime.get_available_providers()


@pytest.fixture(scope="session")
def note(request: pytest.FixtureRequest) -> Iterator[Note]:
    """Take measurements under a title; they are written to the file that --results names."""
    with recorded("tests", request.config.getoption("--results")) as take:
        yield take


@pytest.fixture(scope="session")
def weekly_tests(request: pytest.FixtureRequest) -> frozenset[str]:
    """Ids, without parameters, of the collected tests that `make weekly` runs and CI does not."""
    return request.config.stash[_WEEKLY]


@pytest.fixture(scope="session")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PipelineCache]:
    """Sample pipelines and folders made from them, shared by the whole run; read them, never write to them."""
    cache = PipelineCache(cache_root(tmp_path_factory.getbasetemp()))
    yield cache
    assert cache.changed() == [], "a test wrote to a shared pipeline folder"


@pytest.fixture(scope="session")
def nano(pipelines: PipelineCache) -> Path:
    """Stable Diffusion with one block in each network, a diffusers folder; for tests that export or interrupt."""
    return pipelines.nano()


@pytest.fixture(scope="session")
def nano_single(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`nano` as one file in the original layout, `model.safetensors`, in a folder with its tokenizer and scheduler."""
    from support.original_layout import write_original

    folder = tmp_path_factory.mktemp("single")
    for name in ("tokenizer", "scheduler"):
        shutil.copytree(nano / name, folder / name)
    write_original(nano, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def nano_exported(pipelines: PipelineCache, nano: Path) -> Path:
    """`nano` as float32 ONNX."""
    return pipelines.exported(nano)


@pytest.fixture(scope="session")
def nano_cpu(pipelines: PipelineCache, nano_exported: Path) -> Path:
    """`nano` optimized for the CPU provider."""
    return pipelines.optimized(nano_exported, provider="cpu")


@pytest.fixture(scope="session")
def micro(pipelines: PipelineCache) -> Path:
    """The sample pipeline `tiny` with a narrow UNet, a diffusers folder; see `support.micro`."""
    return pipelines.micro()


@pytest.fixture(scope="session")
def micro_exported(pipelines: PipelineCache, micro: Path) -> Path:
    """`micro` as float32 ONNX."""
    return pipelines.exported(micro)


@pytest.fixture(scope="session")
def micro_cpu(pipelines: PipelineCache, micro_exported: Path) -> Path:
    """`micro` optimized for the CPU provider."""
    return pipelines.optimized(micro_exported, provider="cpu")


@pytest.fixture(scope="session")
def shapes(pipelines: PipelineCache) -> Path:
    """The sample pipeline `shapes` with trained weights, a diffusers folder."""
    return pipelines.sample("shapes")


@pytest.fixture(scope="session")
def shapes_cpu(pipelines: PipelineCache, shapes: Path) -> Path:
    """`shapes` optimized for the CPU provider."""
    return pipelines.optimized(pipelines.exported(shapes), provider="cpu")


@pytest.fixture(scope="session")
def tiny_pipeline(pipelines: PipelineCache) -> Path:
    """The sample pipeline `tiny`, a diffusers folder."""
    return pipelines.sample("tiny")


@pytest.fixture(scope="session")
def tiny_exported(pipelines: PipelineCache, tiny_pipeline: Path) -> Path:
    """`tiny` as float32 ONNX."""
    return pipelines.exported(tiny_pipeline)


@pytest.fixture(scope="session")
def tiny_cpu(pipelines: PipelineCache, tiny_exported: Path) -> Path:
    """`tiny` optimized for the CPU provider."""
    return pipelines.optimized(tiny_exported, provider="cpu")


@pytest.fixture(scope="session")
def tiny_cuda(pipelines: PipelineCache, tiny_exported: Path) -> Path:
    """`tiny` optimized for CUDA in float32, to be checked by lowering."""
    return pipelines.optimized(tiny_exported, provider="cuda")


@pytest.fixture(scope="session")
def tiny_cuda_fp16(pipelines: PipelineCache, tiny_exported: Path) -> Path:
    """`tiny` optimized for CUDA in float16."""
    return pipelines.optimized(tiny_exported, provider="cuda", float16=True)


@pytest.fixture(scope="session")
def tiny_torch(tiny_pipeline: Path) -> Any:
    """`tiny` as diffusers loads it, in float32."""
    return in_diffusers(tiny_pipeline)


@pytest.fixture(scope="session")
def micro_torch(micro: Path) -> Any:
    """`micro` as diffusers loads it, in float32; leave its scheduler as it was."""
    return in_diffusers(micro)


@pytest.fixture(scope="session")
def loaded(micro_cpu: Path) -> Any:
    """`micro`, optimized for the CPU and loaded; use `ours`."""
    from sdonnx.runtime.pipeline import OrtDiffusionPipeline

    return OrtDiffusionPipeline.from_pretrained(micro_cpu)


@pytest.fixture
def ours(loaded: Any) -> Iterator[Any]:
    """This project's pipeline, with the folder's own scheduler at the start of each test."""
    before = loaded.scheduler_config
    yield loaded
    loaded.scheduler_config = before


@pytest.fixture
def theirs(micro_torch: Any) -> Iterator[Any]:
    """The pipeline of diffusers, with the folder's own scheduler at the start of each test."""
    before = micro_torch.scheduler
    yield micro_torch
    micro_torch.scheduler = before
