"""Parse HTML pages without a browser."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

_VOID = {"meta", "link", "img", "br", "hr", "input"}


@dataclass
class Found:
    """A table: caption, column headings, and the cells of each row by row heading."""

    caption: str = ""
    head: list[str] = field(default_factory=list)
    rows: dict[str, list[str]] = field(default_factory=dict)

    def column(self, name: str) -> dict[str, str]:
        """Return the cells of a column by row heading, without the headings of groups."""
        (index,) = [index for index, each in enumerate(self.head) if " ".join(each.split()) == name]
        return {row: cells[index - 1] for row, cells in self.rows.items() if cells}


@dataclass
class Plot:
    """A plot: its name, the texts in it, and its paths as (class, color, path data)."""

    name: str = ""
    alt: str = ""
    texts: list[str] = field(default_factory=list)
    titles: list[str] = field(default_factory=list)
    paths: list[tuple[str, str, str]] = field(default_factory=list)

    def data(self, kind: str) -> list[str]:
        """Return the data of all paths of a class."""
        return [data for each, _, data in self.paths if each == kind]

    def colours(self, kind: str) -> list[str]:
        """Return the different colors of a class, in order."""
        return list(dict.fromkeys(colour for each, colour, _ in self.paths if each == kind))


class Markup(HTMLParser):
    """Parses a page.

    Attributes:
        shape: every tag with the names of its attributes, in order; it must not depend on text from outside.
        texts: every text.
        links: the targets of links and loaded resources.
        headings: headings of the sections.
        tables: every table.
        plots: every plot.
    """

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.shape: list[tuple[str, tuple[str, ...]]] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.headings: list[str] = []
        self.tables: list[Found] = []
        self.plots: list[Plot] = []
        self._open: list[str] = []
        self._cells: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.shape.append((tag, tuple(name for name, _ in attrs)))
        named = dict(attrs)
        self.links += [str(named[name]) for name in ("src", "href", "action", "data", "srcset") if name in named]
        if tag not in _VOID:
            self._open.append(tag)
        if tag == "table":
            self.tables.append(Found())
        if tag == "svg":
            self.plots.append(Plot())
        if tag == "path":
            colour = re.search("--edge: ([^;]*)", named.get("style") or "")
            self.plots[-1].paths.append((named["class"] or "", colour[1] if colour else "", named["d"] or ""))
        if tag == "text":
            self.plots[-1].texts.append("")
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
        if inside != "style":
            self.texts.append(data)
            if inside == "text":
                self.plots[-1].texts[-1] += data
            if inside == "desc":
                self.plots[-1].alt += data
            if inside == "title" and self._open[-2] == "svg":
                self.plots[-1].name += data
            if inside == "title" and self._open[-2] == "path":
                self.plots[-1].titles.append(data)
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

    def plot(self, name: str) -> Plot:
        """Return the first plot of that name."""
        return next(plot for plot in self.plots if plot.name == name)

    def table(self, caption: str) -> Found:
        """Return the only table whose caption ends with the given text."""
        (found,) = [table for table in self.tables if table.caption.strip().endswith(caption)]
        return found
