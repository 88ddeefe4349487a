"""What notebooks show: tables and listings as HTML that is well formed and says the same."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.base.tables import Listing, Table

X = np.ones((4, 8), np.float32)


class Reader(HTMLParser):
    """Cells by rows, all text, and whether every tag is closed in its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    assert reader.open == [] and "<script" not in html and len(html) < 20_000
    return reader


def reports() -> dict[str, Any]:
    with tz.profile() as recorded:
        tz.softmax(X)
    return {"verify": tz.relu.verify(X, dtypes=["float32", "bfloat16"], kinds=["odd"]),
            "bench": tz.relu.bench(X, torch=False, rounds=1), "profile": recorded,
            "knobs": tz.knobs}


@pytest.mark.parametrize("name", ["verify", "bench", "profile", "knobs"])
def test_tables(name: str) -> None:
    shown = reports()[name]
    read_back = read(shown._repr_html_())
    assert len(read_back.rows) >= 2 and len({len(row) for row in read_back.rows}) == 1
    if name == "knobs":
        assert any(row[2] == "TZ_THREADS" for row in read_back.rows)
        return
    assert repr(shown).strip() == str(shown).strip()
    plain = "".join(str(shown).split())
    for row in read_back.rows:
        for cell in row:
            assert "".join(cell.split())[:12] in plain, cell


def test_a_report_of_verify_says_what_was_left_out() -> None:
    report = tz.verify(tz.argmax, X, dtypes=["float32"], kinds=["odd"])
    assert "left out: level gradient" in read(report._repr_html_()).text


def test_texts_are_escaped() -> None:
    table = Table("<b>&", ("<", "n"), (("a<script>", "1"),), ("<i>",), ("x & y",))
    reader = read(table.html())
    assert reader.rows == [["<", "n"], ["a<script>", "1"]]
    assert "x & y" in reader.text and "<b>&" in reader.text
    assert "[red]" in Table("[red]", ("a",), (("[bold]x",),)).text()


@pytest.mark.parametrize("level", ["graph", "expr", "loop", "llvm"])
def test_listings(level: str) -> None:
    made = tz.softmax.lower(X, level)
    assert isinstance(made, str) and isinstance(made, Listing)
    assert read(made._repr_html_()).text == "\n".join(made.splitlines())
    if level == "loop":
        assert '<span style="color:#888">' in made._repr_html_()

    class Printer:
        said = ""

        def text(self, text: str) -> None:
            self.said += text

    printer = Printer()
    made._repr_pretty_(printer, False)
    assert printer.said == made
