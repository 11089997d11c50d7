"""The emulation and the cases of a first use notice faults that are put into the kernels' sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from support.kernel_library import SOURCES, emulated_library

from sdonnx.operators.operator_table import OWN_CONTRACTS

# What is wrong, the file, the text, and the text in its place. Each text occurs once.
FAULTS = {
    "barrier of a block": ("group_norm_kernels.cuh", "  block_sync();\n  cluster_wait();\n", "  cluster_wait();\n"),
    "wait of a cluster": ("group_norm_kernels.cuh", "  block_sync();\n  cluster_wait();\n", "  block_sync();\n"),
    "barrier of a cluster": ("group_norm_kernels.cuh", "  cluster_arrive();\n  cluster_wait();\n", ""),
    "barrier of the sums": ("group_norm_kernels.cuh", "  spread_sums(spread, sums, edge);\n  block_sync();\n",
                            "  spread_sums(spread, sums, edge);\n"),
    "barrier of the statistics": (
        "group_norm_kernels.cuh",
        "  block_sync();\n  normalize_with(affine, stats, group, edge);\n  half* y",
        "  normalize_with(affine, stats, group, edge);\n  half* y",
    ),
    "barrier of the second launch": ("group_norm_kernels.cuh", "  block_sync();\n  const int group = channel",
                                     "  const int group = channel"),
    "edge of a group": ("group_norm_kernels.cuh", "2 * i < edge", "2 * i <= edge"),
    "shared memory": ("group_norm.cuh", "(plan.cluster + 1) * size_t(plan.slab", "plan.cluster * size_t(plan.slab"),
    "clusters": ("group_norm_kernels.cuh", "if (lane < cluster) *cluster_peer", "if (lane < 1) *cluster_peer"),
    "rows in shared memory": ("group_norm_kernels.cuh", "apply(affine, tile[size_t(i) * blockDim.x]",
                              "apply(affine, tile[size_t(i) * 32]"),
    "rows in registers": ("group_norm_kernels.cuh", "if (last + i < left)", "if (last + i + 1 < left)"),
    "row of the second launch": ("group_norm_kernels.cuh", "fmaf(terms[j], affine.scale[j], affine.shift[j])",
                                 "terms[j] + affine.shift[j]"),
    "last row": ("layer_norm.cuh", "if (row >= a.rows) return;", "if (row + 1 >= a.rows) return;"),
    "gate of a norm": ("layer_norm.cuh", "values[j] *= other[j]", "values[j] += other[j]"),
    "sum of a norm": ("layer_norm.cuh", "a.sum + base + at * 8, pack(values[i])", "a.sum + base + at * 8, x[i]"),
    "half a warp": ("layer_norm.cuh", "launch(kernels[ceil_div(channels, 256) - 1]", "launch(kernels[0]"),
    "gate": ("bias_split_gelu.cuh", "gelu(gate[j] + gate_bias[j])", "gelu(gate[j])"),
    "rows": ("bias_split_gelu.cuh", "ceil_div(a.rows, is_long ? 4 : 1)", "ceil_div(a.rows - 1, is_long ? 4 : 1)"),
    "keys behind the last": ("attention_portable.cuh", "i % 2 >= keys)", "i % 2 > keys)"),
    "counts of keys": ("attention_portable.cuh", "min(max(a.counts[image], 1), a.keys)", "a.keys"),
    "rows between tiles": ("attention_short.cuh", "copies_wait<1>();\n  block_sync();", "copies_wait<1>();"),
    "next queries": ("attention_short.cuh", "S::kTile, query + stride);", "S::kTile, query);"),
    "bias of the second half": ("concat_channels.cuh", "is_x ? a.bias_x : a.bias_y", "is_x ? a.bias_x : a.bias_x"),
    "width of the second half": ("concat_channels.cuh", "at = is_x ? column : column - a.split", "at = column"),
    "last vector": ("concat_channels.cuh", "if (vector < a.vectors) {", "if (vector + 1 < a.vectors) {"),
    "rescaled result": ("attention_portable.cuh", "? shrink.x : shrink.y", "? shrink.x : shrink.x"),
    "barrier before the values": (
        "attention_portable.cuh",
        "    block_sync();  // all warps have read the keys, and all values are there\n", "",
    ),
    "barrier before the next values": (
        "attention_portable.cuh",
        "    block_sync();  // all warps have read the values, and the next keys are there\n", "",
    ),
    "sum of earlier keys": ("attention_portable.cuh", "      sum[r] *= shrink[r];\n", ""),
    "next keys": ("attention_portable.cuh", "a.keys, key + KEYS, KEYS);", "a.keys, key, KEYS);"),
    "heads": ("attention_short.cuh", "head = blockIdx.y % a.heads", "head = blockIdx.y / a.heads"),
    "residual": ("mat_mul.cuh", "if (p.residual) sum +=", "if (p.residual) sum -="),
}  # fmt: skip

CHECK = """
import sys
from dataclasses import replace
from pathlib import Path
from sdonnx.doctor.check_kernels import OWN_KERNEL_CASES_FILE, read_kernel_cases
from sdonnx.doctor.sessions import kernel_opener
from sdonnx.doctor.verdict import judge
opener = kernel_opener("cpu", library=Path(sys.argv[1]))
cases = read_kernel_cases(OWN_KERNEL_CASES_FILE)
checks = tuple(check for check in cases.checks if check.case.op_type in sys.argv[2:])
assert checks
verdict, _ = judge(replace(cases, checks=checks), opener, {}, full=False)
print("sound" if verdict.sound else "faulty")
"""


OPERATORS = {
    "attention_portable.cuh": ("Attention",),
    "attention_short.cuh": ("Attention",),
    "bias_split_gelu.cuh": ("BiasSplitGelu",),
    "concat_channels.cuh": ("ConcatChannels",),
    "group_norm_kernels.cuh": ("GroupNorm",),
    "layer_norm.cuh": ("LayerNorm", "SkipLayerNorm"),
    "mat_mul.cuh": ("MatMul",),
}
"""The operators whose kernels a file holds; those of other files are checked by all."""


def checked(library: Path, operators: Iterable[str]) -> str:
    """Return "sound", "faulty", or "stopped" where the emulation ended the process."""
    command = [sys.executable, "-c", CHECK, str(library), *operators]
    # With few multiprocessors, a warp of attention_short.cuh computes several tiles; GroupNorm needs clusters.
    capability = "8" if "Attention" in operators else "9"
    environment = os.environ | {"SDONNX_EMULATED_CAPABILITY": capability}
    done = subprocess.run(command, cwd=SOURCES.parent, env=environment, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "stopped"


@pytest.mark.slow
def test_sources_are_sound() -> None:
    assert checked(emulated_library(), ["Attention"]) == "sound"
    assert checked(emulated_library(), [name for name in OWN_CONTRACTS if name != "Attention"]) == "sound"


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_noticed(name: str, tmp_path: Path) -> None:
    emulated_library()  # skips without a compiler
    file, right, wrong = FAULTS[name]
    shutil.copytree(SOURCES / "src", tmp_path / "src")
    shutil.copy(SOURCES / "Makefile", tmp_path)
    path = tmp_path / "src" / file
    text = path.read_text(encoding="utf-8")
    assert text.count(right) == 1
    path.write_text(text.replace(right, wrong), encoding="utf-8")
    # Compiling takes longer than running without optimization.
    make = ["make", "-C", str(tmp_path), "emulated", "EMULATION_OPTIMIZATION=-O0"]
    subprocess.run(make, check=True, capture_output=True)
    library = tmp_path / "build" / "libsdonnx_kernels_emulated.so"
    assert checked(library, OPERATORS.get(file, OWN_CONTRACTS)) in ("faulty", "stopped")
