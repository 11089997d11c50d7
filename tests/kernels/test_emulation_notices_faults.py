"""The emulation and the cases of a first use notice faults that are put into the kernels' sources."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from support.kernel_library import SOURCES, emulated_library

from sdonnx.operators.operator_table import OUR_CONTRACTS

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
    "odd height": ("upsample_nearest.cuh", "if (i + 1 >= a.out_height)", "if (i + 2 >= a.out_height)"),
    "odd width": ("upsample_nearest.cuh", "has_right = j + 1 < a.out_width", "has_right = j + 2 < a.out_width"),
    "row of an odd image": ("upsample_nearest.cuh", "image * a.out_height + i", "2 * int64_t(row)"),
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
    "query of a copy": ("attention_short.cuh", "query_image = image % a.query_images", "query_image = 0"),
    "channels of a row": ("group_norm_kernels.cuh", " * a.table_width + a.offset;", " * a.table_width;"),
    "barrier of the parameters": ("sampler.cuh", "  block_sync();\n", ""),
    "residual": ("mat_mul.cuh", "if (p.residual) sum +=", "if (p.residual) sum -="),
    "stride of packed rows": ("attention_args.h", "token) * a.stride + head", "token) * a.heads * HEAD + head"),
    "largest number of a row": ("rows.cuh", "fmaxf(most, fabsf(values[i][j]))", "fmaxf(most, values[i][j])"),
    "rest of a quotient": ("rows.cuh", "fmaf(-first, scale, value)", "fmaf(first, scale, value)"),
    "gate in 8 bits": ("rows.cuh", "values[j] *= gelu(gates[j])", "values[j] += gelu(gates[j])"),
    "scale of a column": ("scaled_mat_mul.cuh", "a.w_scales[column + j]", "a.w_scales[column]"),
}  # fmt: skip

CHECK = """
import sys
from pathlib import Path
from sdonnx.doctor.check_kernels import DEFAULT_BACKEND, OWN_KERNEL_CASES_FILE, compare, read_kernel_cases
from sdonnx.doctor.check_kernels import kernel_opener
opener = kernel_opener("cpu", library=Path(sys.argv[1]))
cases = read_kernel_cases(OWN_KERNEL_CASES_FILE)
checks = [check for check in cases.checks if check.first_use and check.case.op_type in sys.argv[2:]]
assert checks
results = compare(cases, checks, opener, dtypes=("float16",), backends=DEFAULT_BACKEND)
print("sound" if all(result.state == "correct" for result in results) else "faulty")
"""


def checked(library: Path, operators: Iterable[str]) -> str:
    """Return "sound", "faulty", or "stopped" where the emulation ended the process."""
    command = [sys.executable, "-c", CHECK, str(library), *operators]
    # With few multiprocessors, a warp of attention_short.cuh computes several tiles; GroupNorm needs clusters.
    capability = "8" if "Attention" in operators else "9"
    environment = os.environ | {"SDONNX_EMULATED_CAPABILITY": capability}
    done = subprocess.run(command, cwd=SOURCES.parent, env=environment, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "stopped"


def is_part(file: str, of: str) -> bool:
    """Return whether a header is another one, or included by it."""
    text = (SOURCES / "src" / of).read_text(encoding="utf-8")
    return file == of or any(is_part(file, each) for each in re.findall(r'#include "(\w+\.c?u?h)"', text))


def built(folder: Path, file: str, right: str = "", wrong: str = "") -> tuple[Path, list[str]]:
    """Compile the operators that a header is part of, with a change of the header.

    Args:
        folder: an empty folder.
        file: the name of the header.
        right: text that it contains once; empty for no change.
        wrong: the text in its place.

    Returns:
        The library, and the names of its operators.
    """
    emulated_library()  # skips without a compiler
    for part in ("src", "weights"):
        shutil.copytree(SOURCES / part, folder / part)
    shutil.copy(SOURCES / "Makefile", folder)
    library, changed = folder / "src" / "library.cu", folder / "src" / file
    text, operators = library.read_text(encoding="utf-8"), list[str]()
    for header in re.findall(r'#include "(\w+\.cuh)"', text):
        content = (folder / "src" / header).read_text(encoding="utf-8")
        names = re.findall(r'Signature (\w+_signature)\(\) {\n  return {"(\w+)"', content)
        assert names
        if is_part(file, header):
            operators += [operator for _, operator in names]
            continue
        text = text.replace(f'#include "{header}"\n', "")
        for function, _ in names:
            assert text.count(f"Operator({function}()),") == 1
            text = text.replace(f"Operator({function}()),", "")
    assert set(operators) <= OUR_CONTRACTS.keys()
    library.write_text(text, encoding="utf-8")
    if right:
        text = changed.read_text(encoding="utf-8")
        assert text.count(right) == 1
        changed.write_text(text.replace(right, wrong), encoding="utf-8")
    # Compiling takes longer than running without optimization.
    make = ["make", "-C", str(folder), "emulated", "EMULATION_OPTIMIZATION=-O0"]
    subprocess.run(make, check=True, capture_output=True)
    return folder / "build" / "libsdonnx_kernels_emulated.so", operators


# CI compiles one source, with a fault and without: each takes 4 s.
IN_CI = "barrier of the parameters"


def cases(values: Iterable[str], in_ci: str) -> list[Any]:
    """Return the values as parameters of a test, all but one weekly."""
    return [pytest.param(value, marks=[] if value == in_ci else [pytest.mark.weekly]) for value in values]


@pytest.mark.slow
@pytest.mark.parametrize("file", cases(sorted({file for file, _, _ in FAULTS.values()}), FAULTS[IN_CI][0]))
def test_sources_are_sound(file: str, tmp_path: Path) -> None:
    assert checked(*built(tmp_path, file)) == "sound"


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(FAULTS, IN_CI))
def test_fault_is_noticed(name: str, tmp_path: Path) -> None:
    assert checked(*built(tmp_path, *FAULTS[name])) in ("faulty", "stopped")
