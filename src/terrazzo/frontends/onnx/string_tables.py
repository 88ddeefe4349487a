"""Strings that are only moved about and looked up become numbers where they come in.

An encoder of the strings in each column takes columns out, and looks up each in a table of its
own. One look at every string, in the words of all tables together, says as much; columns of
numbers are taken out, translated and encoded by compiled code. Tokens are looked up as they are
cut, so that they never become strings of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from terrazzo.frontends.onnx.strings import EACH_KNOWN, NUMBERS, REFUSE, STRINGS, TOKENS, fresh_name

_MOVERS = {"Gather", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Split",
           "Identity", "Concat", "Expand", "Tile"}
_ML = "ai.onnx.ml"
_MOST_TRANSLATED = 1 << 22  # entries of all translations together


@dataclass(frozen=True, eq=False)
class Table:
    """A number for each of some words, and one for all others."""

    numbers: dict[str, Any]
    other: Any
    dtype: Any

    def translation(self, words: Sequence[str]) -> np.ndarray:
        """The numbers of some words, and last that of a word that is not among them."""
        return np.array([*(self.numbers.get(w, self.other) for w in words), self.other],
                        self.dtype)


def numbered_strings(graph: Any, subgraph_reads: set[str]) -> None:
    """Rewrite a GraphProto in place whose nodes are in order; subgraphs read some names of it."""
    tables = {i: t for i, node in enumerate(graph.node) if (t := _table_of(node)) is not None}
    words = list(dict.fromkeys(w for t in tables.values() for w in t.numbers))
    if not (tables or any(map(_refuses, graph.node))) or (
            (len(words) + 1) * len(tables) > _MOST_TRANSLATED):
        return
    nodes = _Rewriting(graph, tables, words, subgraph_reads).nodes()
    del graph.node[:]
    graph.node.extend(nodes)


def _encoder(node: Any) -> bool:
    return node.domain == _ML and node.op_type == "OneHotEncoder"


def _refuses(node: Any) -> bool:
    """Whether an encoder of numbers has to fail on those it does not know."""
    return _encoder(node) and not _attribute(node, "zeros", 1) and bool(
        _attribute(node, "cats_int64s"))


def _attribute(node: Any, name: str, default: Any = None) -> Any:
    from onnx import helper

    found = next((a for a in node.attribute if a.name == name), None)
    return default if found is None else helper.get_attribute_value(found)


def _text(words: Sequence[bytes]) -> list[str]:
    return [w.decode("utf-8", "replace") for w in words]


def _table_of(node: Any) -> Table | None:
    """What a node that looks strings up finds."""
    if node.domain == STRINGS and node.op_type == NUMBERS:
        words = _text(_attribute(node, "words"))
        return Table({w: i for i, w in reversed(list(enumerate(words)))}, -1, np.int64)
    if _encoder(node) and _attribute(node, "cats_strings"):
        words = _text(_attribute(node, "cats_strings"))
        return Table({w: i for i, w in enumerate(words)}, -1, np.int64)
    if node.domain == _ML and node.op_type == "LabelEncoder" and _attribute(node, "keys_strings"):
        keys = _text(_attribute(node, "keys_strings"))
        for kind, dtype, usual in (("int64", np.int64, -1), ("float", np.float32, -0.0)):
            values = _attribute(node, f"values_{kind}s")
            if values and len(values) == len(keys):
                return Table(dict(zip(keys, values, strict=True)),
                             _attribute(node, f"default_{kind}", usual), dtype)
    return None


class _Rewriting:
    """The nodes of a graph, one after the other, and what became of the strings so far."""

    def __init__(self, graph: Any, tables: dict[int, Table], words: list[str],
                 subgraph_reads: set[str]):
        self.graph, self.tables, self.words = graph, tables, words
        # A single table is looked up in place of a translation.
        self.only = next(iter(tables.values())) if len(tables) == 1 else None
        self.outside = subgraph_reads | {o.name for o in graph.output}
        self.taken = self.outside | {n for node in graph.node for n in (*node.input, *node.output)}
        self.readers: dict[str, list[tuple[int, int]]] = {}
        for i, node in enumerate(graph.node):
            for k, name in enumerate(node.input):
                self.readers.setdefault(name, []).append((i, k))
        self.take_numbers: set[int] = set()  # nodes that do as well with numbers
        for i, node in reversed(list(enumerate(graph.node))):
            if i in tables or (_moves(node) and all(map(self.only_numbers, node.output))):
                self.take_numbers.add(i)
        self.number: dict[str, str] = {}  # the name of what stands for a string tensor
        self.made: list[Any] = []

    def only_numbers(self, name: str) -> bool:
        """Whether all that read a string tensor do as well with numbers."""
        return name not in self.outside and bool(self.readers.get(name)) and all(
            i in self.take_numbers and (k == 0 or self.graph.node[i].op_type == "Concat")
            for i, k in self.readers[name])

    def nodes(self) -> list[Any]:
        """All nodes of the graph, rewritten."""
        for i, node in enumerate(self.graph.node):
            if i in self.tables:
                self.look_up(node, self.tables[i])
            elif i in self.take_numbers:
                self.move(node)
            elif node.domain == "com.microsoft" and node.op_type == "Tokenizer" and len(
                    node.output) == 1 and self.only_numbers(node.output[0]):
                name = self.number[node.output[0]] = self.fresh(node.output[0])
                self.add(TOKENS, [node.input[0]], [name], node.name, STRINGS,
                         **self.looked_up()).attribute.extend(node.attribute)
            elif _refuses(node):
                self.encode(node, node.input[0], list(_attribute(node, "cats_int64s")))
            else:
                self.made.append(node)
        return self.made

    def add(self, op: str, inputs: Sequence[str], outputs: Sequence[str], name: str = "",
            domain: str = "", **attributes: Any) -> Any:
        from onnx import helper

        node = helper.make_node(op, inputs, outputs, name=name, domain=domain, **attributes)
        self.made.append(node)
        return node

    def fresh(self, name: str) -> str:
        return fresh_name(f"{name}_numbers", self.taken)

    def numbers_of(self, name: str) -> str:
        """The numbers of the strings in a tensor."""
        if name not in self.number:
            self.number[name] = self.fresh(name)
            self.add(NUMBERS, [name], [self.number[name]], name, STRINGS, **self.looked_up())
        return self.number[name]

    def looked_up(self) -> dict[str, Any]:
        """What strings are looked up in, as attributes."""
        if self.only is None:
            return {"words": self.words, "other": len(self.words)}
        return {"words": self.words, "numbers": [self.only.numbers[w] for w in self.words],
                "other": self.only.other}

    def move(self, node: Any) -> None:
        """The same movement of numbers."""
        moved = type(node)()
        moved.CopyFrom(node)
        for k, name in enumerate(node.input):
            if k == 0 or node.op_type == "Concat":
                moved.input[k] = self.numbers_of(name)
        for k, name in enumerate(node.output):
            if name:
                moved.output[k] = self.number[name] = self.fresh(name)
        self.made.append(moved)

    def look_up(self, node: Any, table: Table) -> None:
        """A table of words becomes one of numbers."""
        from onnx import numpy_helper

        direct = node.input[0] not in self.number
        numbers = self.numbers_of(node.input[0])
        found = self.fresh(node.output[0]) if _encoder(node) else node.output[0]
        if self.only is None:
            known = self.fresh(node.output[0])
            self.add("Constant", [], [known],
                     value=numpy_helper.from_array(table.translation(self.words)))
            self.add("Gather", [known, numbers], [found], node.name)
        elif direct:
            self.made[-1].output[0] = found
        else:
            self.add("Identity", [numbers], [found], node.name)
        if _encoder(node):
            self.encode(node, found, list(range(len(_attribute(node, "cats_strings")))))

    def encode(self, node: Any, numbers: str, classes: Sequence[int]) -> None:
        """Rows of zeros with a one, and where that is asked for an error if there is none."""
        self.add("OneHotEncoder", [numbers], node.output, node.name, _ML, cats_int64s=classes)
        if not _attribute(node, "zeros", 1):
            known = self.fresh(node.output[0])
            self.add(EACH_KNOWN, [node.output[0]], [known], node.name, STRINGS)
            self.add(REFUSE, [known, numbers], [], node.name, STRINGS)


def _moves(node: Any) -> bool:
    return (node.domain in ("", "ai.onnx") and node.op_type in _MOVERS) or (
        node.domain == _ML and node.op_type == "ArrayFeatureExtractor")
