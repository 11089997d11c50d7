"""`explain`, and the warnings: a fusion that is missing is never silent."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from support.pipelines import COMPONENTS, copied, refused, replaced, snapshot

from sdonnx.__main__ import main
from sdonnx.cli.explain import explained
from sdonnx.errors import FolderError, OptionError, ProviderError
from sdonnx.optimize.optimizer import optimize_folder

NORM = "down_blocks.0.resnets.0.norm1"


def unfit_norm(graph: onnx.GraphProto) -> None:
    """Give the first group norm 5 channels a group; the kernel wants an even number."""
    norm = next(node for node in graph.node if node.op_type == "GroupNormalization")
    (groups,) = (attribute for attribute in norm.attribute if attribute.name == "num_groups")
    groups.i = 64


def approximate_gelus(graph: onnx.GraphProto) -> None:
    """Make every gelu the approximation by tanh, which is another function."""
    for node in graph.node:
        if node.op_type == "Gelu":
            del node.attribute[:]
            node.attribute.append(onnx.helper.make_attribute("approximate", "tanh"))


def no_gates(graph: onnx.GraphProto) -> None:
    """Subtract where a gated linear unit multiplies: no rule knows that."""
    gelus = {node.output[0] for node in graph.node if node.op_type == "Gelu"}
    for node in graph.node:
        if node.op_type == "Mul" and gelus & set(node.input):
            node.op_type = "Sub"


def no_attentions(graph: onnx.GraphProto) -> None:
    """Put the first input of every attention in its place."""
    for node in graph.node:
        if node.op_type == "Attention":
            node.op_type = "Identity"
            del node.input[1:]
            del node.attribute[:]


@pytest.fixture(scope="module")
def own(tiny_exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of `tiny` as ONNX, in which `changed` may put other graphs; links of weights are refused."""
    return copied(tiny_exported, tmp_path_factory.mktemp("own") / "tiny")


@contextlib.contextmanager
def changed(folder: Path, component: str, change: Callable[[onnx.GraphProto], None], **config: Any) -> Iterator[Path]:
    """Change one graph of a folder, and entries of its configuration, as long as the block lasts."""
    path, settings = folder / component / "model.onnx", folder / component / "config.json"
    model = onnx.load(path, load_external_data=False)
    change(model.graph)
    content = json.loads(settings.read_text()) | config
    with replaced(path, model.SerializeToString()), replaced(settings, json.dumps(content).encode()):
        yield folder


@pytest.fixture(scope="module")
def unfit(own: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Optimized with one group norm of the UNet that no kernel takes; read it, never write to it."""
    out = tmp_path_factory.mktemp("unfit") / "out"
    with changed(own, "unet", unfit_norm):
        optimize_folder(own, out)
    return out


def with_report(optimized: Path, folder: Path, report: Any) -> Path:
    """Write a folder of which there is the index, and that report: no more is read of an optimized one."""
    folder.mkdir()
    (folder / "model_index.json").write_bytes((optimized / "model_index.json").read_bytes())
    (folder / "sdonnx.json").write_text(json.dumps(report))
    return folder


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    """The lines that the command prints."""
    assert main(["explain", *map(str, arguments)]) == 0
    return capsys.readouterr().out.splitlines()


def cells(lines: list[str], title: str) -> list[list[str]]:
    """The rows of the table under a title that begins so."""
    begin = next(index for index, line in enumerate(lines) if line.strip().startswith(title))
    end = next(index for index, line in enumerate(lines) if index > begin and line.startswith("└"))
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines[begin:end] if line.startswith("│")]


# --- output -----------------------------------------------------------------------------------------------------------


def test_a_table_for_each_component(tiny_cuda: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(tiny_cuda)
    lines = shown(capsys, tiny_cuda)
    assert snapshot(tiny_cuda) == before
    assert cells(lines, "unet: ") == [
        ["attention", "8", "8", "8"],
        ["geglu", "4", "4", "4"],
        ["group_norm", "21", "21", "21"],
        ["layer_norm", "12", "12", "12"],
        ["convolution", "33", "33", "33"],
    ]
    assert cells(lines, "text_encoder: ") == [["attention", "2", "2", "2"], ["layer_norm", "5", "5", "5"]]
    for component in ("vae_encoder", "vae_decoder"):
        assert [row[0] for row in cells(lines, f"{component}: ")] == ["attention", "group_norm", "convolution"]
        assert all(len(set(row[1:])) == 1 for row in cells(lines, f"{component}: "))
    assert not any("warning" in line or " left: " in line for line in lines)


def test_prints_failures_with_reasons(unfit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, unfit, "--component", "unet")
    (row,) = (row for row in cells(lines, "unet: ") if row[0] == "group_norm")
    assert row == ["group_norm", "21", "20", "21"]
    (index,) = (index for index, line in enumerate(lines) if "64 groups" in line)
    assert lines[index].startswith("unet: channels_last: ChannelsLast left 1: 320 channels in 64 groups")
    assert lines[index + 1].split() == ["at", NORM]
    warnings = [line for line in lines if line.startswith("warning: ")]
    assert [line for line in warnings if "20 of 21" in line and "group_norm" in line]
    assert not any(line.startswith(("text_encoder", "vae")) for line in lines)


def test_prints_a_single_stage(unfit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for line in shown(capsys, unfit, "--stage", "channels_last") if not line.startswith(("warning", " "))]
    assert lines
    assert {line.split(": ")[1] for line in lines} == {"channels_last"}
    assert {line.split(": ")[0] for line in lines} >= {"unet", "vae_decoder"}


def test_places_of_one_reason_stand_together(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with changed(own, "unet", approximate_gelus):
        lines = shown(capsys, own, "--component", "unet", "--stage", "geglu")
    (index,) = (index for index, line in enumerate(lines) if "approximation" in line)
    assert "GegluToBiasSplitGelu left 4: " in lines[index]
    places = [place.strip(" ,") for place in lines[index + 1].removeprefix("    at ").split(", ")]
    assert len(places) == 4
    assert all("transformer_blocks.0.ff" in place for place in places)


def test_long_lists_are_cut_unless_all_is_asked_for(
    tiny_cuda: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A report in which a reason has twelve places."""
    report = json.loads((tiny_cuda / "sdonnx.json").read_text())
    places = [f"blocks.{index}" for index in range(12)]
    (stage,) = (stage for stage in report["components"]["unet"]["stages"] if stage["stage"] == "bias_add")
    stage["refused"] = [{"rule": "R", "reason": "[bold]no[/bold] kernel", "count": 12, "at": places}]
    folder = with_report(tiny_cuda, tmp_path / "folder", report)
    some = shown(capsys, folder, "--component", "unet", "--stage", "bias_add")
    assert "unet: bias_add: R left 12: [bold]no[/bold] kernel" in some
    assert f"    at {', '.join(places[:8])} and 4 more" in some
    assert f"    at {', '.join(places)}" in shown(capsys, folder, "--component", "unet", "--stage", "bias_add", "--all")


def test_reports_operators_that_are_not_candidates(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with changed(own, "unet", no_gates):
        unet = explained(own)[1]["unet"]
        lines = shown(capsys, own, "--component", "unet")
    assert unet["left"] == {"Gelu": 4}
    assert len(set(unet["left_at"]["Gelu"])) == 4
    (index,) = (index for index, line in enumerate(lines) if line.startswith("unet: 4 Gelu left"))
    assert lines[index + 1] == f"    at {', '.join(unet['left_at']['Gelu'])}"


def test_prints_the_factor_of_norms(tiny_cuda: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copied(tiny_cuda, tmp_path / "scaled")
    report = json.loads((folder / "sdonnx.json").read_text())
    report["components"]["vae_decoder"] |= {"norm_scale": 2**-7, "scaled_norms": 22}
    del report["components"]["unet"]["norm_scale"]  # as in folders of older versions
    (folder / "sdonnx.json").write_text(json.dumps(report))
    lines = [line for line in shown(capsys, folder) if ": precision: " in line]
    assert lines == ["vae_decoder: precision: 22 group norms read values times 1/128; the result is the same"]


def test_prints_disabled_fusions(tiny_exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = optimize_folder(tiny_exported, tmp_path / "out", disabled=["bias_splitgelu", "attention"])
    assert report.disabled == ["attention", "bias_splitgelu"]
    lines = shown(capsys, tmp_path / "out")
    assert lines[-1] == "disabled: attention, bias_splitgelu"
    assert not any(line.startswith("warning") for line in lines)
    assert main(["explain", str(tmp_path / "out"), "--stage", "geglu"]) == 2
    assert "disabled: attention, bias_splitgelu" in capsys.readouterr().err


def test_no_graph_is_loaded(tiny_cuda: Path) -> None:
    heavy = ("onnx", "onnx_ir", "onnxscript", "onnxruntime", "torch", "numpy")
    code = (
        "import sys\nfrom sdonnx.__main__ import main\n"
        f"assert main(['explain', {str(tiny_cuda)!r}]) == 0\n"
        f"print(sorted(set({heavy!r}) & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


# --- exported folders -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("provider", ["cuda", "cpu"])
def test_an_exported_folder_is_fused_in_memory(
    provider: str, tiny_exported: Path, tiny_cuda: Path, tiny_cpu: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(tiny_exported)
    folder = {"cuda": tiny_cuda, "cpu": tiny_cpu}[provider]
    disabled, reports = explained(tiny_exported, provider)
    assert (disabled, reports) == explained(folder)
    assert list(reports) == list(COMPONENTS)
    given = ["--provider", provider] if provider == "cpu" else []  # the other is the default
    assert shown(capsys, tiny_exported, *given) == shown(capsys, folder)
    assert snapshot(tiny_exported) == before


# --- warnings ---------------------------------------------------------------------------------------------------------


def test_warnings_are_printed_and_written(own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with changed(own, "unet", approximate_gelus):
        assert main(["optimize", "-i", str(own), "-o", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    written = json.loads((tmp_path / "out" / "sdonnx.json").read_text())["components"]["unet"]["warnings"]
    assert [line for line in lines if line.startswith("warning")] == [f"warning: unet: {text}" for text in written]
    assert any("0 of 4" in text and "geglu" in text for text in written)
    assert any("the stage geglu " in text for text in written)
    assert any("explain" in line and str(tmp_path / "out") in line for line in lines)


def test_widths_without_a_kernel_are_no_cause_to_warn(micro_exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is wrong with a narrow sample, as `shapes` is; the reason is shown."""
    _, reports = explained(micro_exported)
    assert {name: report["warnings"] for name, report in reports.items() if report["warnings"]} == {}
    assert any("has no kernel" in line for line in shown(capsys, micro_exported, "--component", "unet"))


@pytest.mark.parametrize("component", ["unet", "vae_decoder", "text_encoder"])
@pytest.mark.parametrize("provider", ["cuda", "cpu"])
def test_missing_attentions_are_a_warning(component: str, provider: str, own: Path) -> None:
    """The graph holds none of them, so no rule fails, and only the architecture reveals it."""
    with changed(own, component, no_attentions):
        _, reports = explained(own, provider)
    warnings = reports[component]["warnings"]
    count = {"unet": 8, "vae_decoder": 1, "text_encoder": 2}[component]
    assert reports[component]["expected"]["attention"] == {"before": 0, "after": 0, "expected": count}
    assert any(f"0 of {count}" in text and "attention" in text for text in warnings)
    assert any("the stage attention " in text for text in warnings)
    assert all(not report["warnings"] for name, report in reports.items() if name != component)


def test_unknown_architecture_warns_only_of_stages(own: Path) -> None:
    with changed(own, "unet", no_attentions, _class_name="SomeOtherUNet"):
        unet = explained(own)[1]["unet"]
    assert unet["expected"] == {}
    assert [text for text in unet["warnings"] if "the stage attention " in text]
    assert not any(" of " in text for text in unet["warnings"])


def test_an_autoencoder_without_attention_is_no_cause_to_warn(own: Path) -> None:
    with changed(own, "vae_decoder", no_attentions, mid_block_add_attention=False):
        warnings = explained(own)[1]["vae_decoder"]["warnings"]
    assert not any("attention" in text for text in warnings)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--component", "unett"], ("unett", "vae_decoder")),
        (["--stage", "gelu"], ("'gelu'", "geglu")),
        (["--component", "text_encoder", "--stage", "Attention"], ("'Attention'", "attention")),
        (["--provider", "cpu"], ("cuda", "cpu")),
    ],
)
def test_unknown_names_are_one_line(
    given: list[str], words: tuple[str, ...], tiny_cuda: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(tiny_cuda), *given]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert [word for word in words if word not in captured.err] == []


def test_folders_that_are_none(tmp_path: Path, tiny_pipeline: Path, tiny_exported: Path) -> None:
    with refused(FolderError, "does not exist"):
        explained(tmp_path / "nowhere")
    with refused(FolderError, "model_index.json"):
        explained(tmp_path)
    with refused(FolderError, "without ONNX graphs", "sdonnx export -m"):
        explained(tiny_pipeline)
    with refused(ProviderError, "'tpu'"):
        explained(tiny_exported, "tpu")


def test_a_provider_that_an_optimized_folder_is_not_for(tiny_cuda: Path) -> None:
    assert explained(tiny_cuda, "cuda") == explained(tiny_cuda)
    with refused(OptionError, "optimized for cuda, not cpu"):
        explained(tiny_cuda, "cpu")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda report: report.pop("disabled"),  # as an earlier version wrote it
        lambda report: report.update(components=[]),
        lambda report: report["components"].update(unet=3),
        lambda report: report["components"]["unet"].pop("warnings"),
        lambda report: report["components"]["unet"].update(expected={"attention": 8}),
        lambda report: report["components"]["unet"].update(expected={"attention": {"before": 8}}),
        lambda report: report["components"]["unet"].update(operators_after={"Conv": "three"}),
        lambda report: report["components"]["unet"].update(left_at={"Conv": 3}),
        lambda report: report["components"]["unet"]["stages"].append("attention"),
        lambda report: report["components"]["unet"]["stages"][0].pop("fired"),
        lambda report: report["components"]["unet"]["stages"][0].update(refused=[{"rule": "R"}]),
    ],
)
def test_a_report_that_cannot_be_shown(
    spoil: Callable[[Any], object], tiny_cuda: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = json.loads((tiny_cuda / "sdonnx.json").read_text())
    spoil(report)
    folder = with_report(tiny_cuda, tmp_path / "folder", report)
    assert main(["explain", str(folder)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "sdonnx.json cannot be shown" in captured.err
    assert "optimize the pipeline again" in captured.err
