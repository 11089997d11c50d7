"""Parse HTML pages without a browser."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

_VOID = {"meta", "link", "img", "br", "hr", "input"}


@dataclass
class Found:
    """A table: caption, column headings, and the cells of each row by row heading."""

    caption: str = ""
    head: list[str] = field(default_factory=list)
    rows: dict[str, list[str]] = field(default_factory=dict)


class Markup(HTMLParser):
    """Parses a page.

    Attributes:
        shape: every tag with the names of its attributes, in order; it must not depend on text from outside.
        texts: every text.
        links: the targets of links and loaded resources.
        headings: headings of the sections.
        tables: every table.
    """

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.shape: list[tuple[str, tuple[str, ...]]] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.headings: list[str] = []
        self.tables: list[Found] = []
        self._open: list[str] = []
        self._cells: list[str] = []
        self._data: dict[str, str] = {}
        self._script = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.shape.append((tag, tuple(name for name, _ in attrs)))
        named = dict(attrs)
        self.links += [str(named[name]) for name in ("src", "href", "action", "data", "srcset") if name in named]
        if tag not in _VOID:
            self._open.append(tag)
        if tag == "script":
            self._script = named.get("id") or ""
        if tag == "table":
            self.tables.append(Found())
        if tag == "tr":
            self._cells = []
        if tag in ("td", "th"):
            self._cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag == "tr" and "tbody" in self._open:
            self.tables[-1].rows[self._cells[0].strip()] = [cell.strip() for cell in self._cells[1:]]
        elif tag == "tr":
            self.tables[-1].head = [cell.strip() for cell in self._cells]

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside == "script":
            self._data[self._script] = self._data.get(self._script, "") + data
        elif inside != "style":
            self.texts.append(data)
            if inside == "h2":
                self.headings.append(data)
            if "td" in self._open or "th" in self._open:
                self._cells[-1] += data
            elif inside == "caption":
                self.tables[-1].caption += data

    @property
    def text(self) -> str:
        """The visible text, with single spaces."""
        return " ".join(" ".join(self.texts).split())

    @property
    def figures(self) -> list[dict[str, Any]]:
        """The figures of the plots; empty without plots."""
        found: list[dict[str, Any]] = json.loads(self._data.get("figures", "[]"), parse_constant=_reject)
        return found

    def table(self, caption: str) -> Found:
        """Return the only table whose caption ends with the given text."""
        (found,) = [table for table in self.tables if table.caption.strip().endswith(caption)]
        return found


def _reject(name: str) -> None:
    raise AssertionError(f"{name} is not valid JSON")
