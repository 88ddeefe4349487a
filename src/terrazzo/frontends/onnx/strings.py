"""Nodes that compute with numbers and have strings at their ends, taken apart.

A classifier with labels that are strings is one with numbers for labels, and then a table of words;
a TfIdfVectorizer of strings is a table of numbers, and then one of integers. What computes can be
compiled; the tables are looked up by the host.
"""

from __future__ import annotations

from typing import Any

STRINGS = "terrazzo.strings"
WORDS, NUMBERS, TOKENS = "Words", "Numbers", "TokenNumbers"
EACH_KNOWN, REFUSE = "EachKnown", "Refuse"
_CLASSIFIERS = {
    "LinearClassifier": "classlabels_ints", "SVMClassifier": "classlabels_ints",
    "TreeEnsembleClassifier": "classlabels_int64s",
}


def without_strings(graph: Any) -> None:
    """Take such nodes of a GraphProto apart, in place."""
    if not any(_words_of(n) for n in graph.node):
        return
    fresh = []
    taken = {name for n in graph.node for name in (*n.input, *n.output)}
    for node in graph.node:
        words = _words_of(node)
        if words is None:
            fresh.append(node)
        elif node.op_type == "TfIdfVectorizer":
            fresh += _of_numbers(node, words, taken)
        else:
            fresh += _with_words(node, words, taken)
    del graph.node[:]
    graph.node.extend(fresh)


def _words_of(node: Any) -> Any:
    """The attribute with the strings of a node that can be taken apart."""
    if node.domain == "ai.onnx.ml" and node.op_type in _CLASSIFIERS:
        name = "classlabels_strings"
    elif node.domain in ("", "ai.onnx") and node.op_type == "TfIdfVectorizer":
        name = "pool_strings"
    else:
        return None
    return next((a for a in node.attribute if a.name == name and a.strings), None)


def _with_words(node: Any, words: Any, taken: set[str]) -> list[Any]:
    from onnx import helper

    inner = _without(node, words)
    inner.attribute.append(helper.make_attribute(
        _CLASSIFIERS[node.op_type], list(range(len(words.strings)))))
    label = fresh_name(f"{node.output[0]}_number", taken)
    looked_up = helper.make_node(WORDS, [label], [node.output[0]], name=node.name, domain=STRINGS,
                                 words=list(words.strings))
    inner.output[0] = label
    return [inner, looked_up]


def _of_numbers(node: Any, words: Any, taken: set[str]) -> list[Any]:
    from onnx import helper

    known = list(dict.fromkeys(words.strings))
    place = {word: number for number, word in enumerate(known)}
    inner = _without(node, words)
    inner.attribute.append(helper.make_attribute("pool_int64s", [place[w] for w in words.strings]))
    numbers = fresh_name(f"{node.input[0]}_numbers", taken)
    looked_up = helper.make_node(NUMBERS, [node.input[0]], [numbers], name=node.name,
                                 domain=STRINGS, words=known)
    inner.input[0] = numbers
    return [looked_up, inner]


def _without(node: Any, attribute: Any) -> Any:
    from onnx import NodeProto

    inner = NodeProto()
    inner.CopyFrom(node)
    del inner.attribute[:]
    inner.attribute.extend(a for a in node.attribute if a.name != attribute.name)
    return inner


def fresh_name(name: str, taken: set[str]) -> str:
    """A name like this one that is not taken, and is from now on."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name
