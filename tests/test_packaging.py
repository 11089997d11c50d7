"""What gets installed, what gets imported, and in which direction."""

from __future__ import annotations

import ast
import configparser
import subprocess
import sys
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
MAY_IMPORT_TORCH = {"export", "sample", "benchmark", "verify", "quickstart"}
RUNTIME = {"runtime", "samplers", "doctor"}
# The extras that a module's imports may need beyond the runtime's.
EXTRAS = {
    **{
        unit: {"optimize"}
        for unit in (
            "graph",
            "fusions",
            "precision",
            "compose",
            "interface",
            "report",
            "optimize",
            "configuration",
            "component",
            "posterior",
            "decision",
            "stream",
            "automatic",
        )
    },
    "runtime": {"captions"},
    **{unit: {"export"} for unit in ("export", "sample")},
    **{unit: {"export", "benchmark"} for unit in ("benchmark", "verify", "quickstart")},
}
RUNTIME_LIBRARIES = {"numpy", "onnxruntime", "tokenizers", "PIL", "rich", "tqdm"}
OPTIONAL_LIBRARIES = {"bs4", "ftfy"}  # captions are cleaned where these are

# A module imports from the levels before its own; only command lines import from one another.
LEVELS = (
    {"errors"},
    {"claim", "prompts"},
    {"adapters", "folder", "samplers", "parity"},
    {"certificate"},
    {"families", "doctor", "upgrade"},
    {"graph", "expected", "inspection"},
    {"configuration", "decision"},
    {"fusions", "precision", "compose", "interface", "stream"},
    {"posterior", "report"},
    {"component"},
    {"optimize", "export", "sample", "runtime"},
    {"automatic", "terminal"},
    {"benchmark"},
    {"verify"},
    {"__main__", "explain", "generate", "optimize_pipeline", "quickstart"},
)
# Modules of these names are command lines wherever they lie.
COMMANDS = {"__main__", "command"}


# What gets imported


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


def _imports(module: str) -> Iterator[str]:
    """The dotted names that `module` imports anywhere in it, functions and type checking included."""
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
    """What `LEVELS` calls `module`: the first name below the package, but command lines by their own."""
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


@pytest.mark.parametrize("module", LAYERED)
def test_imports_go_one_way(module: str) -> None:
    unit = _unit(module)
    commands = len(LEVELS) - 1
    for name in _own_imports(module):
        other = _unit(name)
        assert other == unit or _level(other) < _level(unit) or _level(unit) == commands, f"imports {name}"


@pytest.mark.parametrize("module", LAYERED)
def test_torch_is_imported_in_few_places(module: str) -> None:
    assert _unit(module) in MAY_IMPORT_TORCH or not _libraries(module) & TORCH_SIDE


@pytest.mark.parametrize("module", [module for module in LAYERED if _unit(module) in RUNTIME])
def test_runtime_imports_only_its_libraries(module: str) -> None:
    """Checks the module and everything of the package that it reaches."""
    reached, waiting = set(), {module}
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


def test_runtime_runs_without_the_converters() -> None:
    modules = [module for module in LAYERED if _unit(module) in RUNTIME]
    block = f"import sys; sys.modules.update(dict.fromkeys({sorted(CONVERTERS)!r}))"
    assert _run(f"{block}\nimport {', '.join(modules)}\nprint('imported')") == "imported"


# The public names


def test_public_names_are_held() -> None:
    assert sorted(sdonnx.__all__) == sorted(
        [
            "FolderError",
            "OptionError",
            "OrtDiffusionPipeline",
            "OutputError",
            "PromptError",
            "ProviderError",
            "SchedulerError",
            "SdonnxError",
            "WeightsError",
            "__version__",
            "export_pipeline",
            "optimize_folder",
            "write_sample",
        ]
    )


@pytest.mark.parametrize("name", sdonnx.__all__)
def test_public_name_exists(name: str) -> None:
    assert name in dir(sdonnx)
    assert getattr(sdonnx, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'sdonnx' has no attribute 'export_pipelines'"):
        _ = sdonnx.export_pipelines


# What gets installed


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


@pytest.mark.parametrize("module", LAYERED)
def test_imports_are_required_directly(module: str) -> None:
    """A library that is there only because another needs it can be gone with that one's next version."""
    homes = packages_distributions()
    direct = _direct({_runtime()} | EXTRAS.get(_unit(module), set()))
    required = {canonicalize_name(requirement.name) for requirement in direct}
    for library in _libraries(module):
        assert required & set(map(canonicalize_name, homes[library])), library


def test_optimizing_needs_no_torch() -> None:
    closure = _closure({_runtime(), "optimize"})
    assert {"onnx", "onnx-ir", "onnxscript"} <= closure
    assert not closure & TORCH_SIDE


def test_every_installed_package_is_pinned() -> None:
    closure = _closure({_runtime(), "export", "benchmark", "dev"})
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
