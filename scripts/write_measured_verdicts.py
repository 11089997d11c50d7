"""Write `sdonnx/doctor/measured_verdicts.json` from docs/results: `python scripts/write_measured_verdicts.py`.

To add a machine, run this on it and commit both files:

    sdonnx doctor --fresh --json docs/results/doctor-NAME.json
    python scripts/write_measured_verdicts.py

No verdict on our own kernels holds after an edit of kernels/src. They can be checked without ONNX Runtime's:

    export SDONNX_KERNELS=kernels/build/libsdonnx_kernels.so
    python -m pytest tests/gpu/test_kernels_gpu.py -k test_whole_check --results docs/results/own-kernels-NAME.json

`--check` writes nothing. It reports whether verdicts ship for the kernels as they are now; status 1 if not. A test does
the same (docs/decisions/0163).
"""

import argparse
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sdonnx.doctor.check_kernels import OWN_KERNEL_CASES_FILE, KernelCaseSet, digest_of, read_kernel_cases
from sdonnx.doctor.measured_verdicts import MEASURED_VERDICTS_FILE, measured_verdict_file, measured_verdicts
from sdonnx.doctor.verdict import Verdict

ROOT = Path(__file__).resolve().parent.parent

COMMAND = "sdonnx doctor --fresh --json docs/results/doctor-NAME.json"
OWN_COMMAND = (
    "python -m pytest tests/gpu/test_kernels_gpu.py -k test_whole_check --results docs/results/own-kernels-NAME.json"
)


def content() -> str:
    """Return the file's content for the results of this checkout."""
    paths = sorted((ROOT / "docs" / "results").glob("*.json"))
    records = [(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths]
    return measured_verdict_file(records, digest_of(), digest_of(OWN_KERNEL_CASES_FILE))


def source_digest() -> str:
    """Return the digest of the kernels' sources in this checkout."""
    command = ["make", "-C", str(ROOT / "kernels"), "--silent", "--no-print-directory", "digest"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@dataclass(frozen=True)
class Kernels:
    """The kernels on which a verdict has to ship: ONNX Runtime's or our own.

    Attributes:
        name: their name in messages.
        key: the parts of a verdict's key that depend on this checkout only.
        cases: the kernel cases of this checkout.
        command: checks them on a GPU and writes a record to docs/results.
    """

    name: str
    key: Mapping[str, str]
    cases: KernelCaseSet
    command: str


def kernels_of_checkout() -> tuple[Kernels, Kernels]:
    """Return ONNX Runtime's kernels and our own, as this checkout installs and compiles them."""
    cases, own_cases = read_kernel_cases(), read_kernel_cases(OWN_KERNEL_CASES_FILE)
    onnxruntime = pinned(ROOT / "requirements-cuda.txt", "onnxruntime-gpu")
    built = {
        "kernel_sources": source_digest(),
        "kernel_compiler": pinned(ROOT / "kernels" / "compiler.py", "nvidia-cuda-nvcc"),
    }
    return (
        Kernels("ONNX Runtime's kernels", {"onnxruntime": onnxruntime, "kernel_cases": cases.digest}, cases, COMMAND),
        Kernels(
            "our own kernels",
            {"onnxruntime": onnxruntime, "kernel_cases": own_cases.digest, **built},
            own_cases,
            OWN_COMMAND,
        ),
    )


def pinned(file: Path, package: str) -> str:
    """Return the version of a package that a file pins with ==."""
    (version,) = re.findall(rf"\b{re.escape(package)}==([\w.]+)", file.read_text(encoding="utf-8"))
    return str(version)


def missing(verdicts: Iterable[Verdict], kinds: Iterable[Kernels]) -> list[str]:
    """Return a line for each kind of kernels on which no verdict holds: found, expected, and the commands to run.

    Args:
        verdicts: the verdicts that ship.
        kinds: the kernels on which one has to hold.
    """
    shipped, lines = list(verdicts), []
    for kernels in kinds:
        is_own = "kernel_sources" in kernels.key
        reasons = [reasons_against(each, kernels) for each in shipped if ("kernel_sources" in each.key) == is_own]
        nearest = min(reasons, key=len, default=["no verdict ships; expected one"])
        if nearest:
            run = f"run on a GPU: {kernels.command}; then: python scripts/write_measured_verdicts.py"
            lines.append(f"{kernels.name}: {', '.join(nearest)}; {run}")
    return lines


def reasons_against(verdict: Verdict, kernels: Kernels) -> list[str]:
    """Return why a verdict does not hold for kernels; nothing if it does.

    A first use checks fp16 only. A full check has to hold all cases in fp16, and another one those of a first use.
    """
    reasons = [
        f"{name} of the verdict that ships is {verdict.key.get(name)}, expected {value}"
        for name, value in kernels.key.items()
        if verdict.key.get(name) != value
    ]
    expected = Counter(
        check.case.op_type
        for check in kernels.cases.checks
        if "float16" in check.kernels and (verdict.full or check.first_use)
    )
    ran = {line.name: line.correct + line.wrong for line in verdict.summary if line.dtype == "float16"}
    reasons += [
        f"{ran.get(operator, 0)} cases of {operator} ran, expected {count}"
        for operator, count in expected.items()
        if ran.get(operator, 0) != count
    ]
    if not verdict.complete:
        reasons.append("the check was not complete")
    return reasons


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description="Write the verdicts that ship with the package.")
    parser.add_argument("--check", action="store_true", help="only report whether the kernels have a verdict")
    if not parser.parse_args(arguments).check:
        MEASURED_VERDICTS_FILE.write_text(content(), encoding="utf-8")
        return 0
    kinds = kernels_of_checkout()
    lines = missing(measured_verdicts(MEASURED_VERDICTS_FILE), kinds)
    print(
        "\n".join(lines)
        or f"verdicts ship for all kernels; the sources of our own are {kinds[1].key['kernel_sources']}"
    )
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
