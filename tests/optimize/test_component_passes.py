"""The list of passes over a component: order, conditions, and additional passes."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.models.registry import family_of
from sdonnx.optimize.component_passes import FUSION_PASSES, PASSES, ComponentJob, ComponentPass, run_passes
from sdonnx.optimize.open_component import open_component
from sdonnx.optimize.optimize_request import OptimizeRequest
from sdonnx.precision.policy import Precision, PrecisionPolicy

HALF = OptimizeRequest(precision=Precision("float16"))
PLAIN = OptimizeRequest(precision=Precision("float16"), kernels="none")


def job_for(folder: Path, name: str, request: OptimizeRequest, out: Path | None = None) -> ComponentJob:
    pipeline = PipelineFolder.open(folder)
    family = family_of(pipeline)
    spec = family.component(name)
    policy = request.precision.policies([name])[name]
    return ComponentJob(spec, open_component(pipeline, family, spec), request, out, policy)


def recorded(passes: tuple[ComponentPass, ...], ran: list[str]) -> list[ComponentPass]:
    """Return the passes, each of which also appends its name to `ran`."""

    def record(each: ComponentPass) -> ComponentPass:
        def run(job: ComponentJob) -> None:
            ran.append(each.name)
            each.run(job)

        return ComponentPass(each.name, run, each.applies)

    return [record(each) for each in passes]


QUANTIZES = ("copy unfused", "quantize", "require not quantized", "write exchange graph")
BY_OPTION = ("inspect", "write own kernel graphs", *QUANTIZES)
BY_COMPONENT = ("scale group norms", "scale residual stream", "count upcast")


@pytest.mark.parametrize(
    ("request_", "left_out"),
    [
        (OptimizeRequest(), {"convert precision", *BY_COMPONENT, *BY_OPTION}),
        (PLAIN, {*BY_COMPONENT, *BY_OPTION}),
        (HALF, {*BY_COMPONENT, *QUANTIZES, "inspect"}),
    ],
    ids=["float32", "float16", "both forms"],
)
def test_passes_run_in_order_under_their_conditions(
    request_: OptimizeRequest, left_out: set[str], micro_exported: Path, tmp_path: Path
) -> None:
    ran: list[str] = []
    report = run_passes(recorded(PASSES, ran), job_for(micro_exported, "unet", request_, tmp_path / "unet"))
    assert ran == [each.name for each in PASSES if each.name not in left_out]
    assert report.precision == request_.precision.dtype
    assert (tmp_path / "unet" / "step.onnx").is_file()


def test_fusion_passes_write_nothing(micro_exported: Path, tmp_path: Path) -> None:
    job = job_for(micro_exported, "unet", OptimizeRequest())
    report = run_passes(FUSION_PASSES, job)
    assert report.operators_after["MultiHeadAttention"] > 0
    assert report.precision == "float32"
    with pytest.raises(ValueError, match="no folder"):
        _ = job.folder


def test_condition_is_evaluated_after_the_passes_before_it(micro_exported: Path) -> None:
    """An additional pass is one more entry; its condition sees the decisions of earlier passes."""
    seen: list[ir.DataType] = []
    probe = ComponentPass(
        "probe", lambda job: seen.append(job.dtype), applies=lambda job: job.conversion == PrecisionPolicy()
    )
    chosen = [each for each in PASSES if each.name in ("adapt interface", "fuse", "choose precision")]
    run_passes([probe, *chosen, probe], job_for(micro_exported, "vae_decoder", HALF))
    assert seen == [ir.DataType.FLOAT16]
