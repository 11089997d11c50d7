"""Installed packages, imports and the direction of imports."""

from __future__ import annotations

import ast
import configparser
import functools
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import sdonnx

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "sdonnx"

# Nothing that draws images needs these, nor anything that only looks at a folder.
CONVERTERS = {"torch", "diffusers", "transformers", "accelerate", "onnx", "onnx_ir", "onnxscript"}
TORCH_SIDE = {"torch", "diffusers", "transformers", "accelerate"}
MAY_IMPORT_TORCH = {"compiler", "export", "sample", "reference", "benchmark", "verify", "cli"}
RUNTIME = {"runtime", "samplers", "lora", "doctor"}
# The extras that a module's imports may need beyond the runtime's.
EXTRAS = {
    **{
        unit: {"optimize"}
        for unit in (
            "graph",
            "operators",
            "fusions",
            "precision",
            "quantization",
            "compose",
            "optimize",
            "precision_search",
        )
    },
    "runtime": {"captions"},
    **{unit: {"export"} for unit in ("compiler", "export", "sample")},
    **{unit: {"export", "benchmark"} for unit in ("reference", "html", "environment_record", "benchmark", "verify")},
    "serve": {"serve", "ray"},
    "cli": {"export", "benchmark", "completion"},
}
RUNTIME_LIBRARIES = {"filelock", "huggingface_hub", "numpy", "onnxruntime", "tokenizers", "PIL", "rich", "tqdm"}
OPTIONAL_LIBRARIES = {"bs4", "ftfy"}  # captions are cleaned where these are

# A module imports from the levels before its own; only command lines import from one another.
LEVELS = (
    {"errors", "_version"},
    {"metrics", "samplers", "folder", "installation"},
    {"models", "lora", "environment_record"},
    {"graph", "sample"},
    {"operators"},
    {"doctor"},
    {"fusions", "compose"},
    {"precision", "quantization"},
    {"optimize", "export", "runtime"},
    {"compiler", "precision_search", "terminal", "reference"},
    {"html"},
    {"benchmark", "serve", "verify"},  # in particular, verify imports nothing of the benchmark
    {"__main__", "cli", "optimize_pipeline"},
)
# Modules of these names are command lines wherever they lie.
COMMANDS = {"__main__"}


TABLES_OF_DATA = {"sdonnx.models.abi"}


# Imports


def _sources() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    modules = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


SOURCES = _sources()
# The package's own module names everything public, for type checkers; it is run for real further down.
LAYERED = sorted(SOURCES.keys() - {"sdonnx"})


@functools.cache
def _imports(module: str) -> frozenset[str]:
    """The dotted names that `module` imports anywhere in it, functions and type checking included."""
    return frozenset(_found_imports(module))


def _found_imports(module: str) -> Iterator[str]:
    path = SOURCES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{source}.{alias.name}" for alias in node.names]
            yield from ([name if name in SOURCES else source for name in names])


def _unit(module: str) -> str:
    """Return the name of a module in `LEVELS`: the first name below the package; command lines by their own."""
    parts = module.split(".")
    return "__main__" if parts[-1] in COMMANDS else parts[1]


def _level(unit: str) -> int:
    return next(index for index, level in enumerate(LEVELS) if unit in level)


def _own_imports(module: str) -> set[str]:
    return {name for name in _imports(module) if name.startswith("sdonnx.")}


def _libraries(module: str) -> set[str]:
    return {name.split(".")[0] for name in _imports(module)} - {"sdonnx"} - sys.stdlib_module_names


def test_every_module_has_a_level() -> None:
    units = {_unit(module) for module in LAYERED}
    assert units <= set().union(*LEVELS), "give the new module its place in LEVELS"


def test_imports_go_one_way() -> None:
    commands = len(LEVELS) - 1
    upward = [
        f"{module} imports {name}"
        for module in LAYERED
        for name in _own_imports(module)
        if not (
            _unit(name) == _unit(module)
            or _level(_unit(name)) < _level(_unit(module))
            or _level(_unit(module)) == commands
        )
    ]
    assert upward == []


def test_torch_is_imported_in_few_places() -> None:
    importing = {_unit(module) for module in LAYERED if _libraries(module) & TORCH_SIDE}
    assert importing <= MAY_IMPORT_TORCH


def test_runtime_imports_only_its_libraries() -> None:
    """Checks the run-time's modules and every module of the package that they reach."""
    reached: set[str] = set()
    waiting = {module for module in LAYERED if _unit(module) in RUNTIME}
    while waiting:
        current = waiting.pop()
        reached.add(current)
        waiting |= _own_imports(current) - reached
    assert set().union(*map(_libraries, reached)) <= RUNTIME_LIBRARIES | OPTIONAL_LIBRARIES
    assert not {_unit(name) for name in reached} & {"graph", "fusions", "precision", "compose", "optimize"}


def _run(code: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def test_importing_the_package_loads_no_library() -> None:
    heavy = CONVERTERS | RUNTIME_LIBRARIES | OPTIONAL_LIBRARIES
    assert _run(f"import sys, sdonnx; print(sorted({heavy!r} & sys.modules.keys()))") == "[]"


def test_loading_pipelines_imports_few_modules() -> None:
    """Features that a call may not need, such as LoRA or ControlNets, are imported on first use."""
    code = (
        "import sys; from sdonnx import OrtDiffusionPipeline; print(sum(m.startswith('sdonnx') for m in sys.modules))"
    )
    assert int(_run(code)) <= 80


def test_runtime_runs_without_the_converters() -> None:
    modules = [module for module in LAYERED if _unit(module) in RUNTIME]
    block = f"import sys; sys.modules.update(dict.fromkeys({sorted(CONVERTERS)!r}))"
    assert _run(f"{block}\nimport {', '.join(modules)}\nprint('imported')") == "imported"


# The public names


def test_public_names_are_held() -> None:
    names = """
        AsyncPipeline DeviceMemoryError FolderError ImageOutput ImageRequest KernelWarning NotFiniteWarning
        NsfwContentWarning OptionError OrtDiffusionPipeline OutputError PackageError PrecisionError PromptError
        PromptTruncatedWarning ProviderError QueueFullError RebuildWarning SchedulerError SdonnxError ServeLimits
        UnavailableError WeightsError __version__ compile compile_pipe export_pipeline load_pipe optimize_folder
        refresh save_pipe write_sample
    """
    assert sorted(sdonnx.__all__) == sorted(names.split())
    assert set(sdonnx.__all__) <= set(dir(sdonnx))
    assert all(getattr(sdonnx, name) is not None for name in sdonnx.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'sdonnx' has no attribute 'export_pipelines'"):
        _ = sdonnx.export_pipelines


def test_module_names_are_unique() -> None:
    """In an editor's tab bar, two modules of one name are the same."""
    names = Counter(path.stem for path in SOURCES.values())
    assert {name for name, count in names.items() if count > 1} <= {"__init__", "__main__"}


def test_few_modules_are_at_the_top() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 9


def test_modules_are_short() -> None:
    """450 lines at most; a table of data may be longer."""
    long = {module for module, path in SOURCES.items() if len(path.read_text(encoding="utf-8").splitlines()) > 450}
    assert long <= TABLES_OF_DATA


# Installation


def _requirements() -> dict[str, list[Requirement]]:
    """The direct requirements by extra, "" for none, as setup.cfg has them."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    lists = {"": config["options"]["install_requires"], **config["options.extras_require"]}
    return {extra: [Requirement(line) for line in text.split("\n") if line] for extra, text in lists.items()}


REQUIREMENTS = _requirements()


def _direct(extras: set[str]) -> list[Requirement]:
    """The requirements of the project with `extras`, those that name the project itself followed."""
    found = [requirement for extra in ["", *sorted(extras)] for requirement in REQUIREMENTS[extra]]
    nested = {extra for requirement in found if requirement.name == "sdonnx" for extra in requirement.extras}
    return _direct(extras | nested) if nested - extras else [r for r in found if r.name != "sdonnx"]


def _closure(extras: set[str]) -> set[str]:
    """Canonical names of everything that an installation with `extras` brings on this machine."""
    names: set[tuple[str, str]] = set()
    waiting = _direct(extras)
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for extra in ["", *requirement.extras]:
            if (name, extra) not in names:
                names.add((name, extra))
                waiting += [
                    needed
                    for needed in map(Requirement, distribution(name).requires or [])
                    if needed.marker is None or needed.marker.evaluate({"extra": extra})
                ]
    return {name for name, _ in names}


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _runtime() -> str:
    return "cpu" if _is_installed("onnxruntime") else "cuda"


def _pins() -> dict[str, str]:
    lines = [
        line
        for file in sorted(ROOT.glob("requirements*.txt"))
        for line in file.read_text(encoding="utf-8").splitlines()
        if line and not line.startswith(("#", "-c"))
    ]
    return dict(line.split("==") for line in lines)


def test_minimal_installation_draws_and_no_more() -> None:
    runtime = "onnxruntime" if _runtime() == "cpu" else "onnxruntime-gpu"
    closure = _closure({_runtime()})
    assert {"numpy", "tokenizers", "pillow", "rich", runtime} <= closure
    assert not closure & {canonicalize_name(name) for name in CONVERTERS}


def test_imports_are_required_directly() -> None:
    """A library that only another library requires may be missing with that one's next version."""
    homes = packages_distributions()
    missing = set()
    for module in LAYERED:
        direct = _direct({_runtime()} | EXTRAS.get(_unit(module), set()))
        required = {canonicalize_name(requirement.name) for requirement in direct}
        missing |= {
            (module, library)
            for library in _libraries(module)
            if not required & set(map(canonicalize_name, homes.get(library, [library])))
        }
    assert missing == set()


def test_optimizing_needs_no_torch() -> None:
    closure = _closure({_runtime(), "optimize"})
    assert {"onnx", "onnx-ir", "onnxscript"} <= closure
    assert not closure & TORCH_SIDE


def test_exporting_needs_no_accelerate() -> None:
    assert "torch" in _closure({_runtime(), "export"})
    assert "accelerate" not in _closure({_runtime(), "export"})


def test_every_installed_package_is_pinned() -> None:
    closure = _closure({_runtime(), "export", "benchmark", "completion", "docs", "dev"})
    assert closure - _pins().keys() == set()


@pytest.mark.parametrize("extra", REQUIREMENTS)
def test_pins_satisfy_the_bounds(extra: str) -> None:
    pins = _pins()
    for requirement in REQUIREMENTS[extra]:
        if requirement.name != "sdonnx":
            assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


def test_every_folder_is_a_package() -> None:
    """A folder without `__init__.py` would be left out of the wheel, silently."""
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_every_file_beside_the_modules_is_installed() -> None:
    """A file that package_data does not name would be left out of the wheel, silently."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    named = {
        path
        for package, patterns in config["options.package_data"].items()
        for pattern in patterns.split()
        for path in ROOT.joinpath(*package.split(".")).glob(pattern)
    }
    present = {path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path for path in present if path.suffix != ".py"} == named


def test_types_are_published() -> None:
    assert (PACKAGE / "py.typed").is_file()


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The source distribution of a copy of the tracked files, and the wheel built from that."""
    folder = tmp_path_factory.mktemp("distributions")
    copy = folder / "source"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "results")
    shutil.copytree(ROOT, copy, ignore=ignored)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(copy)]
    environment = os.environ | {"SDONNX_KERNELS": "0"}  # as `make wheel` does
    subprocess.run(command, check=True, capture_output=True, env=environment)
    (sdist,), (wheel,) = (list((folder / "dist").glob(pattern)) for pattern in ("*.tar.gz", "*.whl"))
    return {"sdist": sdist, "wheel": wheel}


def test_source_distribution_has_the_kernels(distributions: dict[str, Path]) -> None:
    with tarfile.open(distributions["sdist"]) as archive:
        members = {Path(*Path(name).parts[1:]) for name in archive.getnames()}
    listed = subprocess.run(["git", "ls-files", "kernels"], cwd=ROOT, capture_output=True, text=True)
    present = {Path(name) for name in listed.stdout.split()} or {Path("kernels", "src", "library.cu")}
    assert present | {Path("requirements.txt"), Path("requirements-cuda.txt"), Path("setup.py")} <= members
    assert not [path for path in members if "build" in path.parts or path.suffix == ".so"]


def test_distributions_name_no_folder_of_this_machine(distributions: dict[str, Path]) -> None:
    with tarfile.open(distributions["sdist"]) as archive:
        (name,) = [name for name in archive.getnames() if name.count("/") == 1 and name.endswith("/PKG-INFO")]
        file = archive.extractfile(name)
        assert file is not None
        found = [file.read().decode()]
    with zipfile.ZipFile(distributions["wheel"]) as archive:
        found.append(archive.read(f"sdonnx-{sdonnx.__version__}.dist-info/METADATA").decode())
    for text in found:
        assert 'extra == "cuda"' in text
        assert "Requires-Dist: sdonnx-kernels" not in text


@pytest.mark.parametrize(
    ("kind", "variable", "has_kernels", "is_named"),
    [
        ("editable", "", True, True),
        ("wheel", "", True, True),
        ("wheel", "/some/library.so", True, True),
        ("wheel", "0", True, False),
        ("wheel", "", False, False),
    ],
)
def test_extra_cuda_names_the_folder_of_the_kernels(
    kind: str, variable: str, has_kernels: bool, is_named: bool, tmp_path: Path
) -> None:
    _copy_for_metadata(tmp_path, has_kernels=has_kernels)
    required = _requirements_of_build(tmp_path, kind, SDONNX_KERNELS=variable)
    kernels = [(each.url, str(each.marker)) for each in required if each.name == "sdonnx-kernels"]
    assert kernels == [((tmp_path / "kernels").as_uri(), 'extra == "cuda"')] * is_named
    assert {each.name for each in required} >= {each.name for each in REQUIREMENTS["cuda"] + REQUIREMENTS["export"]}


@pytest.mark.parametrize(
    ("folder", "machine", "edit", "is_taken"),
    [
        ("dist", platform.machine(), "", True),
        ("others", platform.machine(), "", True),
        ("dist", "s390x", "", False),
        ("dist", platform.machine(), "// an edit", False),
    ],
)
def test_extra_cuda_names_a_wheel_of_the_same_sources(
    folder: str, machine: str, edit: str, is_taken: bool, tmp_path: Path
) -> None:
    _copy_for_metadata(tmp_path)
    code = "import compiler; print(compiler.sources_digest(), end='')"
    command = [sys.executable, "-c", code]
    digest = subprocess.run(command, cwd=tmp_path / "kernels", check=True, capture_output=True, text=True).stdout
    wheel = tmp_path / folder / f"sdonnx_kernels-{sdonnx.__version__}-py3-none-manylinux_2_28_{machine}.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("sdonnx_kernels/sources.sha256", digest)
    for name in ("broken", "of another kind"):
        other = wheel.with_name(f"sdonnx_kernels-{name}_{machine}.whl")
        with zipfile.ZipFile(other, "w") as archive:
            archive.writestr("sdonnx_kernels/__init__.py", "")
        if name == "broken":
            other.write_bytes(other.read_bytes()[:20])
    with (tmp_path / "kernels" / "src" / "library.cu").open("a") as source:
        source.write(edit)
    required = _requirements_of_build(tmp_path, "wheel", PIP_FIND_LINKS=f"https://example.com {tmp_path / 'others'}")
    (kernels,) = (each for each in required if each.name == "sdonnx-kernels")
    assert kernels.url == (wheel if is_taken else tmp_path / "kernels").as_uri()


def _copy_for_metadata(folder: Path, *, has_kernels: bool = True) -> None:
    names = [
        "setup.cfg",
        "setup.py",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "sdonnx/__init__.py",
        "sdonnx/_version.py",
    ]
    kernels = ["pyproject.toml", "compiler.py", "Makefile", "exports.map", "src/library.cu"]
    for name in names + [f"kernels/{name}" for name in kernels] * has_kernels:
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        shutil.copyfile(ROOT / name, folder / name)
    (folder / "out").mkdir()


def _requirements_of_build(folder: Path, kind: str, **variables: str) -> list[Requirement]:
    """Return the requirements in the metadata of a wheel, or of an editable one."""
    code = f"from setuptools import build_meta; build_meta.prepare_metadata_for_build_{kind}('out')"
    environment = {name: value for name, value in os.environ.items() if name != "SDONNX_KERNELS"} | variables
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True, env=environment)
    (metadata,) = folder.glob("out/*.dist-info/METADATA")
    lines = metadata.read_text(encoding="utf-8").splitlines()
    return [Requirement(line.partition(": ")[2]) for line in lines if line.startswith("Requires-Dist: ")]


@pytest.mark.parametrize("kind", ["sdist", "wheel"])
def test_distributions_install_and_run(kind: str, distributions: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "-q"]
    subprocess.run([*pip, "--target", str(target), str(distributions[kind])], check=True, capture_output=True)
    installed = {path.relative_to(target) for path in (target / "sdonnx").rglob("*") if "__pycache__" not in path.parts}
    present = {path.relative_to(ROOT) for path in PACKAGE.rglob("*") if "__pycache__" not in path.parts}
    assert installed == present
    environment = os.environ | {"PYTHONPATH": str(target)}
    code = "import sdonnx, sys; print(sdonnx.__file__); from sdonnx.__main__ import main; main(['--version'])"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.split() == [str(target / "sdonnx" / "__init__.py"), sdonnx.__version__]
    code = "from sdonnx.installation import install_command; print(install_command('cuda'))"
    done = subprocess.run([*command[:-1], code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout == f"pip install '{distributions[kind]}[cuda]'\n"
