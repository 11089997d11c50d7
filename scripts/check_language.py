"""Count words that plain English avoids, in docstrings and comments: `python scripts/check_language.py [PATH ...]`.

Each word or phrase has a limit per 1,000 words (`LIMITS`). The limits are far above what projects such as onnx_ir and
onnxscript need. Exit status 1 if the checked files as a whole exceed a limit. A package is listed on its own line, so
that the cause is easy to find; `--lines` lists each occurrence.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["LIMITS", "main", "prose", "rates"]

ROOT = Path(__file__).resolve().parent.parent

LIMITS = {
    "what": 1.5, "told/tells": 0.3, "alone": 0.2, "beside": 0.2, "likewise": 0.2, "whose": 0.5, "those of/that of": 0.5,
    "in place of": 0.2,
}  # fmt: skip
"""Maximum count of each entry per 1,000 words; phrases separated by a slash are counted together."""

_PATHS = ("sdonnx", "tests", "scripts", "lab", "examples", "fuzz")
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")


def prose(source: str) -> Iterator[str]:
    """Yield the docstrings and comments of a Python file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield text
        # A string that follows an assignment documents its target.
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("#! ")


def counts(files: Sequence[Path]) -> tuple[int, Counter[str]]:
    """Return the number of words in the files' prose, and how often each entry of `LIMITS` occurs."""
    total, found = 0, Counter[str]()
    for file in files:
        words, entries = _counted(file.read_text(encoding="utf-8"))
        total, found = total + words, found + entries
    return total, found


@functools.cache
def _counted(source: str) -> tuple[int, Counter[str]]:
    texts = [" ".join(text.lower().split()) for text in set(prose(source))]
    found = Counter({entry: sum(len(_pattern(entry).findall(text)) for text in texts) for entry in LIMITS})
    return sum(len(_WORD.findall(text)) for text in texts), found


@functools.cache
def _pattern(entry: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w'-])(?:{entry.replace('/', '|')})(?![\w'-])")


def rates(files: Sequence[Path]) -> dict[str, float]:
    """Return the occurrences per 1,000 words of each entry of `LIMITS`; zeros for files without prose."""
    total, found = counts(files)
    return {entry: 1000 * found[entry] / max(total, 1) for entry in LIMITS}


def _packages(files: Sequence[Path]) -> dict[str, list[Path]]:
    groups: dict[str, list[Path]] = {}
    for file in files:
        parts = file.resolve().relative_to(ROOT).parts
        groups.setdefault("/".join(parts[:2] if len(parts) > 2 else parts[:1]), []).append(file)
    return groups


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the counts of each package and return 1 if the whole exceeds a limit."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    lists = "--lines" in given
    given = [name for name in given if name != "--lines"] or [str(ROOT / name) for name in _PATHS]
    files = sorted(
        file
        for path in map(Path, given)
        for file in ([path] if path.is_file() else path.rglob("*.py"))
        if "__pycache__" not in file.parts
    )
    if not files:
        print(f"error: no Python file in {', '.join(given)}")
        return 1
    for file in files if lists else ():
        for text in sorted(set(prose(file.read_text(encoding="utf-8")))):
            named = [entry for entry in LIMITS if _pattern(entry).search(" ".join(text.lower().split()))]
            if named:
                print(f"{file}: {', '.join(named)}: {' '.join(text.split())}")
    print(f"{'per 1,000 words':28}" + "".join(f"{entry:>18}" for entry in LIMITS) + f"{'words':>9}")
    for name, group in sorted(_packages(files).items()):
        row = rates(group)
        print(f"{name:28}" + "".join(f"{row[entry]:18.1f}" for entry in LIMITS) + f"{counts(group)[0]:9}")
    whole = rates(files)
    exceeded = [entry for entry, limit in LIMITS.items() if whole[entry] > limit]
    print(f"{'all':28}" + "".join(f"{whole[entry]:18.1f}" for entry in LIMITS) + f"{counts(files)[0]:9}")
    for entry in exceeded:
        print(f"error: {entry!r}: {whole[entry]:.1f} per 1,000 words, at most {LIMITS[entry]} allowed")
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
