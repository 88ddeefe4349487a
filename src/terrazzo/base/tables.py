"""Small tables of what was found, for terminals and for notebooks."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any


@dataclass(frozen=True)
class Table:
    """Texts in rows and columns, with a title above and notes below."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    left: int = 1  # so many columns are texts, the others numbers

    def rich(self) -> Any:
        """For a terminal, by rich."""
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(title=Text(self.title), title_justify="left", caption_justify="left",
                          caption=Text("\n".join(self.caption)))
        for number, head in enumerate(self.heads):
            table.add_column(Text(head), justify="left" if number < self.left else "right")
        for row in self.rows:
            table.add_row(*map(Text, row))
        return Group(table, *map(Text, self.notes))

    def text(self, width: int = 120) -> str:
        """As plain text."""
        from rich.console import Console

        console = Console(width=width, force_terminal=False)
        with console.capture() as captured:
            console.print(self.rich())
        return captured.get()

    def html(self) -> str:
        """For a notebook, which has its own style for tables."""
        heads = "".join(f"<th{self._style(n)}>{escape(h)}</th>" for n, h in enumerate(self.heads))
        rows = "".join("<tr>" + "".join(f"<td{self._style(n)}>{escape(cell)}</td>"
                                        for n, cell in enumerate(row)) + "</tr>"
                       for row in self.rows)
        below = "".join(f"<div><small>{escape(line)}</small></div>"
                        for line in (*self.caption, *self.notes))
        return (f"<div><b>{escape(self.title)}</b><table><thead><tr>{heads}</tr></thead>"
                f"<tbody>{rows}</tbody></table>{below}</div>")

    def _style(self, column: int) -> str:
        return f' style="text-align:{"left" if column < self.left else "right"}"'


class ShownAsTable:
    """What prints as a table, and shows as one in notebooks."""

    def shown(self) -> Table:
        """The table."""
        raise NotImplementedError

    def __rich__(self) -> Any:
        return self.shown().rich()

    def __str__(self) -> str:
        return self.shown().text()

    def __repr__(self) -> str:
        return self.shown().text().rstrip()

    def _repr_html_(self) -> str:
        return self.shown().html()


class Listing(str):
    """A text of many lines: a string that notebooks show line by line."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return ('<pre style="white-space:pre; overflow-x:auto; line-height:1.25">'
                + "\n".join(map(_marked, self.splitlines())) + "</pre>")

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))  # what IPython shows in a terminal


def _marked(line: str) -> str:
    """A line with its comment in grey: `#` in our programs, `;` in LLVM's."""
    for sign in ("  # ", "# ", "; "):
        code, found, comment = line.partition(sign)
        if found and (sign == "  # " or not code.strip()):
            return (f'{escape(code)}<span style="color:#888">{escape(found + comment)}</span>')
    return escape(line)
