"""Check that the tests notice mutations of the package: `python scripts/mutate.py [--json FILE] [--only NAME ...]`.

Each entry of `MUTATIONS` changes one place of a copy of the repository and runs the test files that should fail. The
places are found by a regular expression, not by file name, so that the list survives moved modules. A mutation that no
test notices is printed as SURVIVED, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MUTATIONS", "Mutation", "main", "mutated"]

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Mutation:
    """One change of the package's source.

    Attributes:
        name: identifies it.
        find: a regular expression that matches at one place of the package.
        replace: the replacement, as `re.sub` expects it.
        tests: stems of test files, without `test_`; those that exist are run.
    """

    name: str
    find: str
    replace: str
    tests: tuple[str, ...]


MUTATIONS = (
    # Fusion rules
    Mutation("geglu axis", r'get_int\("axis", 0\) (not )?in \(-1, 2\)', r'get_int("axis", 0) \1in (-1, 1, 2)',
             ("geglu", "bias_split_gelu")),
    Mutation("gelu approximation", r'get_string\("approximate", "none"\) != "none"',
             'get_string("approximate", "none") == "never"', ("geglu", "bias_split_gelu")),
    Mutation("attention softcap", r'get_float\("softcap", 0\.0\) or ', "", ("attention", "multi_head_attention")),
    Mutation("attention scale", r'get_float\("scale", 0\.0\):\n( {12})attributes\["scale"\] = scale',
             r'get_float("scale", 0.0):\n\1attributes["scale"] = scale * 2', ("attention", "multi_head_attention")),
    Mutation("attention causality", r'attributes\["unidirectional"\] = 1', 'attributes["unidirectional"] = 0',
             ("attention", "multi_head_attention")),
    Mutation("terms of a skip norm", r"len\(parts\.terms\) != 2:(\n[^\n]*\n\s+if _full_and_skip)",
             r"len(parts.terms) > 3:\1",
             ("residual", "residuals")),
    Mutation("epsilon of a skip norm", r'epsilon = node\.attributes\.get_float\("epsilon", 1e-5\)\n(\s+)normal,',
             r"epsilon = 1e-5\n\1normal,", ("residual", "residuals")),
    Mutation("root of a norm", r"(if (?:deviation|found|_is_square|x is not None)[^\n]*)_is_square\(", r"\1bool(",
             ("norms", "layer_norm", "spelled_out_norms")),
    # Contracts and reference bodies
    Mutation("width of BiasSplitGelu", r"frozenset\(\{2560, 5120, 6144, 10240, 12288\}\)",
             "frozenset({2560, 5120, 6144, 10240, 12288, 64})", ("contract", "bias_split_gelu", "geglu", "operators")),
    Mutation("channels of a group", r"\(channels // groups\) % 2", "(channels // groups) % 1",
             ("contract", "group_norm", "operators")),
    Mutation("body of GroupNorm", r'get_int\("activation", 0\):\n', 'get_int("activation", 1) == 2:\n',
             ("contract", "reference", "group_norm", "operators")),
    Mutation("body of FusedMatMul", r'alpha = node\.attributes\.get_float\("alpha", 1\.0\)\n(\s+factor)',
             r'alpha = node.attributes.get_float("beta", 1.0)\n\1',
             ("contract", "reference", "fused_mat_mul", "operators")),
    Mutation("causal lengths", r"lengths\[0\] != lengths\[1\]", "lengths[0] == -1",
             ("contract", "attention", "multi_head_attention", "operators")),
    # Composed graphs
    Mutation("rows along an axis", r"and axis % max\(rank_of\(first\), 1\) != 0", "and True", ("sharing", "timesteps")),
    Mutation("transposed rows", r'next\(iter\(node\.attributes\.get_ints\("perm", \[-1\]\)\)\) == 0', "True",
             ("sharing", "timesteps")),
    Mutation("index of the step", r'(\w+\.op\("Sub", \w+, \w+\.integers\()1(\)\))', r"\g<1>0\2",
             ("compose", "timesteps")),
    Mutation("channels to inpaint", r"if (given|inputs) == 2 \* (made|outputs) \+ 1:", r"if \1 == 2 * \2 + 2:",
             ("compose", "image_to_image")),
    # Samplers
    Mutation("third order of DPM-Solver", r"\(-0\.5 if stochastic else 0\.5\)", "(0.5 if stochastic else 0.5)",
             ("sampler_steps", "sampler_options")),
    Mutation("slope of DPM-Solver", r"first if heun else \(1 - left\) / 2", "first if not heun else (1 - left) / 2",
             ("sampler_steps", "sampler_options")),
    Mutation("DPM-Solver++ noise", r"sigma \* np\.sqrt\(1 - left\) \* NOISE", "sigma * (1 - left) * NOISE",
             ("sampler_steps", "sampler_options")),
    Mutation("fourth order of PLMS", r"\(55 / 24, -59 / 24, 37 / 24, -9 / 24\)",
             "(55 / 24, -59 / 24, 37 / 24, -8 / 24)",
             ("sampler_steps", "sampler_options")),
    Mutation("variance of DDIM", r"request\.eta\*\*2 \*", "request.eta *", ("sampler_steps", "sampler_options")),
    Mutation("weights of UniPC", r"factorial \*= k \+ 2", "factorial *= k + 1", ("sampler_steps", "sampler_options")),
    Mutation("leading timesteps", r"\(last // points\) \+ options\.steps_offset", "(last // points)",
             ("sampler_steps", "sampler_options", "sampler_plans")),
    Mutation("zero terminal SNR", r"if options\.rescale_betas_zero_snr and never_zero:",
             "if options.rescale_betas_zero_snr and not never_zero:", ("sampler_options", "sampler_steps")),
    # Run-time
    Mutation("deviation of guidance", r"conditional\.std\(axis=axes, keepdims=True, ddof=1\)",
             "conditional.std(axis=axes, keepdims=True, ddof=0)", ("image_to_image", "behaviour", "denoise")),
    Mutation("bits of a uniform number", r"2\*\*53 - 1\)\) \* 2\.0\*\*-53", "2**52 - 1)) * 2.0**-52", ("noise",)),
    Mutation("angle of Box and Muller", r"np\.stack\(\[radius \* np\.cos\(angle\), radius \* np\.sin\(angle\)\]",
             "np.stack([radius * np.sin(angle), radius * np.cos(angle)]", ("noise",)),
    Mutation("last block of noise", r"values\[-_BLOCK:\] = _box_muller\(self\._words\(_BLOCK\)\)",
             "values[whole:] = _box_muller(self._words(_BLOCK))[: count - whole]", ("noise",)),
    Mutation("threshold of a mask", r">= 0\.5\)\.astype\(np\.float32\)", "> 0.5).astype(np.float32)", ("images",)),
    Mutation("range of an image", r"2 \* resized - 1\)\.astype", "resized).astype", ("images",)),
    Mutation("rounded ratios", r"abs\(round\(size\[0\] / size\[1\], 2\) - height / width\)",
             "abs(size[0] / size[1] - width / height)", ("captions", "resolution_bins")),
    Mutation("bilinear places", r"np\.arange\((wanted|new_size)\) \+ 0\.5\)", r"np.arange(\1))",
             ("captions", "resolution_bins")),
    # Precision
    Mutation("fallback without a kernel",
             r"self\.policy\.fallback if self\.policy\.fallback in contract\.dtypes else _FLOAT",
             "self.policy.fallback", ("precision", "convert_precision")),
    Mutation("epsilon of a scaled stream", r"(norm\.attributes[^\n]*epsilon \* scale)\*\*2", r"\1",
             ("residual_scaling", "transformer", "precision", "fuse_transformer")),
    Mutation("safety checker's matmuls", r"if matmul and below_cosines:", "if matmul:", ("precision",
             "safety_checker_head", "safety")),
    # Graph
    Mutation("bounds of the log variance", r"scalar\(bounds\.inputs\[2\]\)\) ==", "scalar(bounds.inputs[2])) !=",
             ("posterior", "vae_posterior")),
    Mutation("standard normal noise", r'get_float\("scale", 1\.0\) == 1\.0\n', 'get_float("scale", 1.0) == 2.0\n',
             ("posterior", "vae_posterior")),
    Mutation("PSNR", r"10 \* (?:math|np)\.log10\(", "20 * np.log10(",
             ("image_agreement",)),
    Mutation("scale of a relative error", r"return distance / size", "return distance / size / 2", ("parity",
             "metrics")),
)  # fmt: skip


def mutated(mutation: Mutation, package: Path) -> tuple[Path, str]:
    """Return the file that a mutation changes, and its new content.

    Raises:
        SystemExit: the place is not found exactly once.
    """
    places = []
    for file in sorted(package.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if found := len(re.findall(mutation.find, text)):
            places += [(file, text)] * found
    if len(places) != 1:
        raise SystemExit(f"error: {mutation.name}: found at {len(places)} places, expected one; correct its expression")
    file, text = places[0]
    changed = re.sub(mutation.find, mutation.replace, text)
    if changed == text:
        raise SystemExit(f"error: {mutation.name}: nothing changes; correct its replacement")
    return file, changed


def _test_files(mutation: Mutation, root: Path) -> list[str]:
    stems = {f"test_{stem}.py" for stem in mutation.tests} | {f"test_fuse_{stem}.py" for stem in mutation.tests}
    found = sorted(str(path.relative_to(root)) for path in (root / "tests").rglob("test_*.py") if path.name in stems)
    found = [path for path in found if not path.startswith("tests/gpu/")]
    if not found:
        raise SystemExit(f"error: {mutation.name}: no test file is called {' or '.join(sorted(stems))}")
    return found


def _copied(root: Path, folder: Path) -> Path:
    ignored = shutil.ignore_patterns(".git", ".carry", ".venv*", "*_cache", "__pycache__", "docs", "build", "out")
    return shutil.copytree(root, folder / "tree", ignore=ignored)


def _pytest(tree: Path, *arguments: str) -> tuple[bool, list[str]]:
    """Run pytest in a tree; return whether a test failed, and the ids of the first failures.

    Raises:
        SystemExit: pytest itself failed.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", "-p", "no:cacheprovider", *arguments]
    path = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, cwd=tree, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    # Exit status 1: tests failed. 5: all are for a GPU. Anything else is an error of the set-up.
    if done.returncode not in (0, 1, 5):
        raise SystemExit(f"error: pytest exited with {done.returncode}\n{done.stdout[-2000:]}")
    return done.returncode == 1, re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)


def _run(mutation: Mutation, root: Path, left_out: Sequence[str]) -> dict[str, object]:
    """Run a mutation's tests in a copy of the tree.

    Args:
        mutation: the mutation.
        root: the tree.
        left_out: ids of tests that fail without a mutation.
    """
    with tempfile.TemporaryDirectory() as scratch:
        copy = _copied(root, Path(scratch))
        file, changed = mutated(mutation, copy / "sdonnx")
        file.write_text(changed, encoding="utf-8")
        files = _test_files(mutation, copy)
        start = time.monotonic()
        failed, by = _pytest(copy, "-x", *(f"--deselect={test}" for test in left_out), *files)
        name = str(file.relative_to(copy / "sdonnx"))
    result = {"mutation": mutation.name, "file": name, "tests": files, "caught": failed, "by": by[:1]}
    seconds = round(time.monotonic() - start, 1)
    print(f"{'caught' if failed else 'SURVIVED'} {mutation.name} ({seconds} s)", flush=True)
    return result


def _commit(root: Path) -> str | None:
    """Return the commit of a tree; None outside a repository."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True)
    return done.stdout.strip() or None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the mutations and return 1 if one survives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to mutate (default: this one)")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    parser.add_argument("--only", nargs="+", help="names of mutations")
    parser.add_argument("--jobs", type=int, default=1, help="mutations to run at the same time (default: 1)")
    parser.add_argument("--check", action="store_true", help="only check that every place is found once")
    options = parser.parse_args(arguments)
    chosen = [each for each in MUTATIONS if options.only is None or each.name in options.only]
    if options.check:
        for each in chosen:
            file, _ = mutated(each, options.root / "sdonnx")
            tests = " ".join(_test_files(each, options.root))
            print(f"{each.name}: {file.relative_to(options.root / 'sdonnx')}; {tests}")
        return 0
    root = options.root.resolve()
    files = sorted({file for each in chosen for file in _test_files(each, root)})
    with ThreadPoolExecutor(options.jobs) as pool, tempfile.TemporaryDirectory() as scratch:
        copy = _copied(root, Path(scratch))
        # A test that fails without a mutation catches nothing.
        left_out = [test for _, failed in pool.map(lambda file: _pytest(copy, file), files) for test in failed]
        print(f"{len(left_out)} tests fail without a mutation and are left out", flush=True)
        results = list(pool.map(lambda each: _run(each, root, left_out), chosen))
    caught = sum(bool(result["caught"]) for result in results)
    print(f"{caught} of {len(results)} mutations caught")
    if options.json is not None:
        record = {
            "command": shlex.join(["python", "scripts/mutate.py", *(arguments or sys.argv[1:])]),
            "caught": caught,
        }
        record |= {"commit": _commit(root), "left_out": left_out, "mutations": results}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if caught == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
