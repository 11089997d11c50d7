"""What a parser that is not a browser finds in a page."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

_VOID = {"meta", "link", "img", "br", "hr", "input"}


@dataclass
class Found:
    """A table's caption, and its rows by their heading, each the texts of its cells."""

    caption: str = ""
    head: list[str] = field(default_factory=list)
    rows: dict[str, list[str]] = field(default_factory=dict)


class Markup(HTMLParser):
    """Parses a page.

    Attributes:
        shape: every tag with the names of its attributes, in order; text from outside must not change it.
        texts: every text.
        links: what is loaded, or led to.
        headings: of the sections.
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
        """All that can be read, with single spaces."""
        return " ".join(" ".join(self.texts).split())

    @property
    def figures(self) -> list[dict[str, Any]]:
        """What the plots are drawn from; empty where there are none."""
        found: list[dict[str, Any]] = json.loads(self._data.get("figures", "[]"), parse_constant=_refuse)
        return found

    def table(self, caption: str) -> Found:
        """The one table with a caption that ends so."""
        (found,) = [table for table in self.tables if table.caption.strip().endswith(caption)]
        return found


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")
