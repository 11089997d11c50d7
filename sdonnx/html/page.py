"""Render pages from templates with this package's style, and write them atomically."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

from sdonnx.errors import OutputError

__all__ = ["check_page", "readable_date", "render_page", "write_page"]


def render_page(template: str, package: str, values: Mapping[str, Any]) -> str:
    """Render a page with this package's style and macros. All values are escaped.

    Args:
        template: file name of the template.
        package: package of the template.
        values: the template's variables.
    """
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package, ""), PackageLoader(__package__, "")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    return environment.get_template(template).render(values, style=Markup(style))


def check_page(path: Path) -> None:
    """Check that a page can be written, before minutes are spent on measuring.

    Raises:
        OutputError: the folder is missing or not writable, or the path exists and is not a file.
    """
    with _write_errors(path):
        if not path.parent.is_dir():
            raise OutputError(f"{path.parent} is not a folder", "an existing folder")
        if path.exists() and not path.is_file():
            raise OutputError(f"{path} is not a file", "a file, or a new name")
        # Write a byte, because permissions do not show whether a file system is read-only or full.
        with tempfile.TemporaryFile(dir=path.parent) as file:
            file.write(b"\0")


def write_page(page: str, path: Path) -> None:
    """Write a page atomically.

    Raises:
        OutputError: the file is not writable.
    """
    check_page(path)
    with _write_errors(path):
        target = path.resolve()  # keep a symbolic link
        partial = target.parent / f".report-{secrets.token_hex(4)}.partial"
        try:
            # File names may contain undecodable bytes, which are lone surrogates in a string.
            with partial.open("xb") as file:
                file.write(page.encode("utf-8", "backslashreplace"))
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"writing {path} failed ({error.strerror})",
            "a folder with enough free space and permission to write",
        ) from error


def readable_date(time: str) -> str | None:
    """Return the date of an ISO 8601 time in words: "5 March 2026"; None for an empty string."""
    if not time:
        return None
    date = datetime.fromisoformat(time)
    return f"{date.day} {date:%B %Y}"
