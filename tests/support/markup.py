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
    """A bar chart: its name, the texts in it, and the pointer texts, colors and lengths (0 to 1) of its bars' parts."""

    name: str = ""
    texts: list[str] = field(default_factory=list)
    titles: list[str] = field(default_factory=list)
    colours: list[str] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)


class Markup(HTMLParser):
    """Parses a page.

    Attributes:
        shape: every tag with the names of its attributes, in order; it must not depend on text from outside.
        texts: every text.
        links: the targets of links and loaded resources.
        headings: headings of the sections.
        tables: every table.
        plots: every bar chart.
        swatches: colors of the swatches.
    """

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.shape: list[tuple[str, tuple[str, ...]]] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.headings: list[str] = []
        self.tables: list[Found] = []
        self.plots: list[Plot] = []
        self.swatches: list[str] = []
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
        if tag == "ul" and named.get("class") == "bars":
            self.plots.append(Plot(named["aria-label"] or ""))
        if tag == "span" and named.get("class") == "swatch":
            self.swatches += re.findall("--swatch: (#[0-9a-f]+)", named["style"] or "")
        if tag == "i":
            part = re.fullmatch("--swatch: (#[0-9a-f]+); --length: ([0-9.]+)", named["style"] or "")
            assert part is not None, named["style"]
            self.plots[-1].titles.append(named["title"] or "")
            self.plots[-1].colours.append(part[1])
            self.plots[-1].lengths.append(float(part[2]))
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
            if inside in ("strong", "em") and "li" in self._open:
                self.plots[-1].texts.append(data)
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
        """Return the first bar chart of that name."""
        return next(plot for plot in self.plots if plot.name == name)

    def table(self, caption: str) -> Found:
        """Return the only table whose caption ends with the given text."""
        (found,) = [table for table in self.tables if table.caption.strip().endswith(caption)]
        return found
