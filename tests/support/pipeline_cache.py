"""Sample pipelines and the folders made from them, each made once in a test run and shared by all workers.

The key of an entry is the content that determines it: the operation, its options, the key of its input and the code
of the modules that it imports, without docstrings and comments. So a directory that outlives the run
(`SDONNX_TEST_CACHE`) stays correct when the code changes.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from filelock import FileLock

import sdonnx
from sdonnx.models.image_adapters import ADAPTERS
from sdonnx.models.spec import Family, Role
from sdonnx.sample.architecture import ADAPTER_FILES
from support.pipelines import snapshot
from support.shared_torchlib import share_torchlib

if TYPE_CHECKING:
    from sdonnx.export.component_plan import ComponentPlan
    from sdonnx.folder.pipeline_folder import PipelineFolder

__all__ = ["CACHE_VARIABLE", "PipelineCache", "cache_root", "run_root"]

CACHE_VARIABLE = "SDONNX_TEST_CACHE"
"""Environment variable that names a directory to keep between runs; by default the cache lives for one run."""

_PACKAGE = Path(sdonnx.__file__).parent
# The modules that make entries.
_SAMPLE = "sdonnx.sample.write_sample"
_EXPORT = "sdonnx.export.export_pipeline"
_OPTIMIZE = "sdonnx.optimize.optimizer"


class PipelineCache:
    """A directory of pipeline folders. Read them, never write to them: `support.pipelines.copied` makes a copy.

    Args:
        root: the directory, which several processes may use at the same time.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._keys: dict[Path, str] = {}
        self._snapshots: dict[Path, dict[str, tuple[int, int]]] = {}

    def sample(self, arch: str, **options: Any) -> Path:
        """Return the diffusers folder that `write_sample(arch, ..., **options)` writes."""
        from sdonnx.sample.write_sample import write_sample

        return self._made(
            "diffusers", ["sample", _code(_SAMPLE), arch, options], lambda out: write_sample(arch, out, **options)
        )

    def micro(self, arch: str = "tiny", **options: Any) -> Path:
        """Return the diffusers folder of a sample, with a narrow UNet where it has one; see `support.micro`."""
        from sdonnx.sample.write_sample import ARCHITECTURES
        from support import micro

        if "unet" not in ARCHITECTURES[arch].networks:
            return self.sample(arch, **options)
        return self._made(
            "diffusers",
            ["micro", _code(_SAMPLE), _digest(Path(micro.__file__)), arch, options],
            lambda out: micro.write_micro(arch, out, **options),
        )

    def nano(self, arch: str = "tiny", **options: Any) -> Path:
        """Return the diffusers folder of a sample with one block in each network; see `support.micro`."""
        from support import micro

        return self._made(
            "diffusers",
            ["nano", _code(_SAMPLE), _digest(Path(micro.__file__)), arch, options],
            lambda out: micro.write_nano(arch, out, **options),
        )

    def exported(self, source: Path, **options: Any) -> Path:
        """Return `source` exported to ONNX with the options of `export_pipeline`.

        Components that were exported from equal files before are copied: a pipeline with one changed component costs
        the export of that component.
        """
        from sdonnx.export.export_pipeline import export_pipeline

        share_torchlib()

        def make(out: Path) -> None:
            controls = (*options.get("controlnets", ()), *options.get("t2i_adapters", ()))
            with self.reusing_components(source, options.get("ip_adapters", ()), controls=controls):
                export_pipeline(source, out, **options)

        described = {name: _described(value, source) for name, value in options.items()}
        return self._made("onnx", ["exported", _code(_EXPORT), self._key_of(source), described], make)

    @contextlib.contextmanager
    def reusing_components(
        self,
        source: Path,
        adapters: Iterable[Path | str] = (),
        fresh: Collection[str] = (),
        *,
        controls: Iterable[Path | str] = (),
    ) -> Iterator[None]:
        """Copy components, in every export in the block, that were exported from equal files before.

        Args:
            source: the diffusers folder that is exported.
            adapters: the files of its IP-Adapters. Their image encoder is the source's own.
            fresh: components to export nevertheless.
            controls: the folders of its ControlNets or T2I-Adapters.
        """
        from sdonnx.export import export_pipeline as module

        digests = [_digest(Path(path)) for path in adapters]
        encoder = [_digest(source / ADAPTERS / "image_encoder")] if digests else []
        networks = [_digest(Path(path)) for path in controls]
        added = {
            Role.CONTROLNET: networks,
            Role.T2I_ADAPTER: networks,
            Role.DENOISER: digests, Role.IMAGE_PROMPT_ADAPTER: digests, Role.IMAGE_PROMPT_ENCODER: encoder
        }  # fmt: skip
        original = module._export_component

        def export(folder: PipelineFolder, family: Family, plan: ComponentPlan, *others: Any) -> None:
            if plan.spec.name in fresh:
                original(folder, family, plan, *others)
            else:
                self._export_component(original, added, folder, family, plan, *others)

        with mock.patch.object(module, "_export_component", export):
            yield

    def _export_component(
        self,
        export: Callable[..., None],
        added: Mapping[Role, list[str]],
        folder: PipelineFolder,
        family: Family,
        plan: ComponentPlan,
        out: Path,
        dtype: str,
        progress: object,
    ) -> None:
        """Export a component, or copy it from an export of equal files.

        Args:
            export: the function of the package that exports a component.
            added: digests of what a component reads outside of its folder, by role.
            folder: the diffusers pipeline.
            family: its family.
            plan: how the component is exported.
            out: the folder of the exported pipeline.
            dtype: the type of weights, inputs and outputs.
            progress: the progress callback.
        """
        from sdonnx.export.exported_families import wrapper_of

        spec, wrapper = plan.spec, wrapper_of(family, plan.spec)
        config = family.join_config(folder, plan.config)
        files = folder.path / spec.source
        # All that `trace` reads: families share components, and no graph contains how latents are scaled.
        description = [
            "component",
            _code(_EXPORT),
            spec.name,
            [(tensor.name, tensor.resolve(config), tensor.integer, tensor.keeps_float32) for tensor in spec.inputs],
            [tensor.name for tensor in spec.outputs_in(config)],
            f"{wrapper.__module__}.{wrapper.__qualname__}",
            [_digest(path) for path in sorted(files.glob("*")) if path.suffix != ".json"],
            {key: value for key, value in plan.config.items() if key != "scaling_factor" and "latents_" not in key},
            dtype,
            added.get(spec.role, []),
        ]

        def make(component: Path) -> None:
            _freeze_modules()
            export(folder, family, plan, component.parent, dtype, progress)

        made = shutil.copytree(self._made(spec.name, description, make), out / spec.name)
        (made / "config.json").write_text(plan.text, encoding="utf-8")

    def adapted(self, source: Path, *names: str, **options: Any) -> Path:
        """Return `source` exported with IP-Adapters of its own.

        Args:
            source: a diffusers folder with adapters.
            names: their files; both of the sample's by default.
            options: further options of `export_pipeline`.
        """
        files = [source / ADAPTERS / name for name in names or ADAPTER_FILES]
        return self.exported(source, ip_adapters=files, **options)

    def float16_with_adapters(self) -> Path:
        """Return Stable Diffusion XL with IP-Adapters, exported in float16."""
        return self.adapted(self.nano("sdxl-tiny-ip-adapter"), dtype="float16")

    def optimized(self, exported: Path, **options: Any) -> Path:
        """Return an exported folder optimized with the options of `optimize_folder`."""
        from sdonnx.optimize.optimizer import optimize_folder

        return self._made(
            "optimized",
            ["optimized", _code(_OPTIMIZE), self._key_of(exported), options],
            lambda out: optimize_folder(exported, out, **options),
        )

    def derived(self, name: str, source: Path, change: Callable[[Path], object]) -> Path:
        """Return a copy of `source` after `change(copy)`.

        Args:
            name: identifies the change; it has to be unique, since code of tests is not part of the key.
            source: a pipeline folder.
            change: edits the folder that it is given, a copy of `source`.
        """

        def make(out: Path) -> None:
            shutil.copytree(source, out)
            change(out)

        return self._made(source.name, ["derived", name, self._key_of(source)], make)

    def changed(self) -> list[str]:
        """Return the folders that were written to after this process began to use them."""
        return [str(folder) for folder, before in self._snapshots.items() if snapshot(folder) != before]

    def _made(self, name: str, description: list[Any], make: Callable[[Path], object]) -> Path:
        """Return the folder `name` of the entry that `description` identifies, made by `make` if it is missing."""
        text = json.dumps(description, sort_keys=True, default=_plain)
        key = hashlib.sha256(text.encode()).hexdigest()[:24]
        entry = self._root / key
        self._root.mkdir(parents=True, exist_ok=True)
        with FileLock(self._root / f"{key}.lock"):
            if not entry.is_dir():
                partial = self._root / f"{key}.partial"
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                make(partial / name)
                (partial / "description.json").write_text(text, encoding="utf-8")
                partial.rename(entry)
        folder = entry / name
        self._keys[folder] = key
        self._snapshots.setdefault(folder, snapshot(folder))
        return folder

    def _key_of(self, folder: Path) -> str:
        return self._keys[folder] if folder in self._keys else _digest(folder)


def _plain(value: object) -> Any:
    """Return a value of a description as JSON has it."""
    return list(value) if isinstance(value, Iterable) else repr(value)


@functools.cache
def _freeze_modules() -> None:
    """Exempt what exports import from garbage collection, which an export does often: 8 % of its time."""
    gc.collect()
    gc.freeze()


def _described(value: Any, source: Path) -> Any:
    """Return an option as JSON, paths below the source relative to it."""
    if isinstance(value, Path):
        return str(value.relative_to(source)) if value.is_relative_to(source) else _digest(value)
    return [_described(each, source) for each in value] if isinstance(value, list | tuple) else value


@functools.cache
def _code(module: str) -> str:
    """Return a digest of a module of the package and of all that it imports from the package, without docstrings."""
    digest = hashlib.sha256()
    found, waiting = set[Path](), [module]
    while waiting:
        path = _path_of(waiting.pop())
        if path is None or path in found:
            continue
        found.add(path)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("sdonnx"):
                waiting += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    for path in sorted(found):
        digest.update(f"{path.relative_to(_PACKAGE)}\0".encode())
        digest.update(ast.dump(_WithoutDocstrings().visit(ast.parse(path.read_text(encoding="utf-8")))).encode())
    return digest.hexdigest()


class _WithoutDocstrings(ast.NodeTransformer):
    """Remove expressions that are strings: docstrings, also of attributes and constants."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) else node


def _path_of(module: str) -> Path | None:
    """Return the file of a module of the package; None for other names."""
    path = _PACKAGE.joinpath(*module.split(".")[1:])
    files = [path / "__init__.py", path.with_suffix(".py")] if path != _PACKAGE else []
    return next((file for file in files if file.is_file()), None)


def _digest(folder: Path, pattern: str = "*") -> str:
    digest = hashlib.sha256()
    files = [folder] if folder.is_file() else sorted(path for path in folder.rglob(pattern) if path.is_file())
    for path in files:
        digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def cache_root(base: Path) -> Path:
    """Return the directory of the cache: the one that the environment names, or one of the run.

    Args:
        base: the base temporary directory of this process.
    """
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named)
    return run_root(base) / "pipelines"


def run_root(base: Path) -> Path:
    """Return the temporary directory of the run: pytest-xdist's workers have directories of their own in it.

    Args:
        base: the base temporary directory of this process.
    """
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
