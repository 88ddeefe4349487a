"""The rewrite engine: rules are data, patterns read like the expressions they match.

    x = Wild("x")
    RULES = RuleTable((
        Rule("multiply by one", P.multiply(x, 1), lambda x: x),
        Rule("square", P.power(x, 2), lambda x: x * x),
    ))
    graph, applied = rewrite(graph, RULES)

A pattern is made of operators (`P.name(...)`), wildcards (`Wild`, which bind a value by name and
may ask a question of it), and numbers (constants by value). A rule's `build` names what it wants
of the match: the wildcards, or `node` for the matched node; it answers with the replacement, or
with None when it would rather not. A replacement must have the type of what it replaces: one that
has another is not applied. Rules look down only, from a node to what it is computed from.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from terrazzo.errors import ArgumentError, CompileError
from terrazzo.graph.ir import Graph, Node, Value
from terrazzo.graph.patterns import Apply, Wild, match_node, same_type
from terrazzo.graph.scopes import trace_scope
from terrazzo.index.guards import rewriting
from terrazzo.knobs import knobs

LEVELS = ("none", "basic", "extended", "layout", "all")


# ---------------------------------------------------------------- rules
@dataclass(frozen=True, eq=False)
class Rule:
    """One named rewrite: what it matches, and what it puts in its place."""

    name: str
    pattern: Apply
    build: Callable[..., Any]
    level: str = "basic"
    doc: str = ""

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ArgumentError(f"rule {self.name!r} has the level {self.level!r}",
                                hint=f"one of {', '.join(LEVELS)}")
        unknown = [p for p in self.wants if p not in {*_names(self.pattern), "node"}]
        if unknown:
            raise ArgumentError(f"rule {self.name!r} asks for {', '.join(unknown)}, which its "
                                "pattern does not bind", hint="name it by a Wild, or take `node`")

    @cached_property
    def wants(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.build).parameters)

    def apply(self, node: Node, uses: Mapping[Value, int] | None = None
              ) -> tuple[Value, ...] | None:
        """What replaces the outputs of a node, or None where the rule does not apply."""
        for found in match_node(self.pattern, node, {}, uses or {}):
            found["node"] = node
            answer = self.build(**{name: found[name] for name in self.wants})
            if answer is None:
                continue
            values = answer if isinstance(answer, tuple) else (answer,)
            if len(values) == len(node.types) and all(
                    same_type(v.type, t) for v, t in zip(values, node.types)):
                return values
        return None


def _names(pattern: Any) -> Iterator[str]:
    if isinstance(pattern, Wild):
        yield pattern.name
    elif isinstance(pattern, Apply):
        if pattern.name is not None:
            yield pattern.name
        for part in (*pattern.args, *(wanted for _, wanted in pattern.attrs)):
            yield from _names(part)


@dataclass(frozen=True, eq=False)
class RuleTable:
    """Rules in order of preference; tables are joined with `+`."""

    rules: tuple[Rule, ...] = ()

    def __add__(self, other: RuleTable) -> RuleTable:
        return RuleTable(self.rules + other.rules)

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.rules)

    def __len__(self) -> int:
        return len(self.rules)

    def __getitem__(self, name: str) -> Rule:
        return next(rule for rule in self.rules if rule.name == name)

    def up_to(self, level: str) -> RuleTable:
        """The rules of a level and of those below it."""
        if level not in LEVELS:
            raise ArgumentError(f"there is no level {level!r}", hint=f"one of {', '.join(LEVELS)}")
        top = LEVELS.index(level)
        return RuleTable(tuple(r for r in self.rules if LEVELS.index(r.level) <= top))


@lru_cache(maxsize=32)
def _by_operator(rules: tuple[Rule, ...], level: str) -> Mapping[str, Sequence[Rule]]:
    """The rules up to a level that may apply to each operator; few tables serve all graphs."""
    index: dict[str, list[Rule]] = {}
    for rule in RuleTable(rules).up_to(level):
        for op in rule.pattern.ops:
            index.setdefault(op, []).append(rule)
    return index


_user_rules: list[Rule] = []


def user_rules() -> RuleTable:
    """The rules that users have added with `rewrite_rule`."""
    return RuleTable(tuple(_user_rules))


def rewrite_rule(pattern: Apply, *, level: str = "basic", name: str | None = None
                 ) -> Callable[[Callable[..., Any]], Rule]:
    """Add a rule of one's own to every compilation; the decorated function builds the result.

        @rewrite_rule(P.exp(P.log(x)))
        def exp_of_log(x):
            return x
    """

    def make(build: Callable[..., Any]) -> Rule:
        rule = Rule(name or build.__name__.replace("_", " "), pattern, build, level,
                    inspect.getdoc(build) or "")
        _user_rules[:] = [r for r in _user_rules if r.name != rule.name] + [rule]
        knobs.renew()  # what was compiled without it is not what would be compiled now
        return rule

    return make


# ---------------------------------------------------------------- applying
class Applied(NamedTuple):
    """A record for the report: which rule changed which node, from which line of the user's."""

    rule: str
    node: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.rule}: {self.node}" + (f"  ({self.where})" if self.where else "")


@dataclass(frozen=True, eq=False)
class Pass:
    """One step of rewriting a graph, kept so that blame can be laid on it."""

    name: str
    before: Graph
    after: Graph
    applied: Sequence[Applied]
    partly: Callable[[int], Graph] | None = None  # only the first so many of its rewrites


def describe(node: Node) -> str:
    """A node in one line: `add(f32[4], f32[]) -> f32[4]`."""
    args = ", ".join("none" if v is None else str(v.type) for v in node.inputs)
    return f"{node.op.name}({args}) -> {', '.join(map(str, node.types))}"


def use_counts(graph: Graph) -> dict[Value, int]:
    """How many inputs of nodes and outputs of the graph each value is."""
    counts: dict[Value, int] = {}
    for value in itertools.chain(graph.outputs, *(n.inputs for n in graph.nodes)):
        if value is not None:
            counts[value] = counts.get(value, 0) + 1
    return counts


def rewrite(graph: Graph, rules: RuleTable, level: str = "all", *,
            limit: int | None = None, most: int | None = None) -> tuple[Graph, list[Applied]]:
    """Apply rules bottom up until none applies; answers the new graph and what was done.

    `limit` bounds the number of applications, so that rules which undo each other are found.
    `most` stops after so many of them, so that the one that does harm is found.
    """
    index = _by_operator(rules.rules, level)
    budget = limit if limit is not None else 1000 + 50 * len(graph.nodes)
    applied: list[Applied] = []
    while True:
        before = len(applied)
        with rewriting():
            graph = _one_round(graph, index, applied, budget, most)
        if len(applied) == before:
            return graph, applied


def _one_round(graph: Graph, index: Mapping[str, Sequence[Rule]], applied: list[Applied],
               budget: int, most: int | None) -> Graph:
    uses = use_counts(graph)

    def visit(node: Node) -> tuple[Value, ...] | None:
        if most is not None and len(applied) >= most:
            return None
        for rule in index.get(node.op.name, ()):
            answer = rule.apply(node, uses)
            if answer is not None:
                applied.append(Applied(rule.name, describe(node), node.where))
                if len(applied) > budget:
                    names = ", ".join(sorted({a.rule for a in applied[-20:]}))
                    raise CompileError(
                        f"rewriting {graph.name} does not end: {len(applied)} rules were applied, "
                        f"lately {names}", where=node.where,
                        hint="two of these rules undo each other, or one matches its own result; "
                             "make the pattern of one of them narrower")
                return answer
        return None

    return sweep(graph, visit, uses)


@dataclass
class _Task:
    """One step of a sweep: enter a node, build it from settled inputs, or settle its outcome."""

    node: Node
    where: str | None  # inherited by nodes that a rewrite made; None: the node's own
    step: str = "enter"
    answer: Sequence[Value] = field(default_factory=tuple)


def sweep(graph: Graph, visit: Callable[[Node], Sequence[Value] | None],
          uses: dict[Value, int] | None = None) -> Graph:
    """Visit every node, producers first; what `visit` answers replaces it and is visited too.

    A replacement's nodes inherit the source line of the node they replace. No recursion, so a
    graph may be as deep as it likes. `uses`, the use counts of the graph, are kept up to date for
    what takes the place of its values: else a rule that asks for a value used once would find one
    in a chain only after as many sweeps as there are rewrites before it.
    """
    uses = {} if uses is None else uses
    original = set(graph.nodes)
    settled: dict[Value, Value] = {}
    stack = [_Task(v.node, None) for v in reversed(graph.outputs) if v.node is not None]
    while stack:
        task = stack.pop()
        node = task.node
        if node.outputs[0] in settled:
            continue
        if task.step == "enter":
            stack.append(_Task(node, task.where, "build"))
            _enter(stack, node.inputs, settled, original, task.where)
        elif task.step == "build":
            inputs = tuple(None if v is None else settled.get(v, v) for v in node.inputs)
            where = node.where if task.where is None or node in original else task.where
            fresh = node
            if where != node.where or any(a is not b for a, b in zip(inputs, node.inputs)):
                fresh = Node(node.op, inputs, node.attrs, node.types, where)
                uses.update((new, uses[old]) for old, new in zip(node.outputs, fresh.outputs)
                            if old in uses)
            with trace_scope():
                answer = visit(fresh)
            if answer is None:
                settled.update(zip(fresh.outputs, fresh.outputs))
                settled.update(zip(node.outputs, fresh.outputs))
            else:
                stack.append(_Task(node, None, "settle", answer))
                _enter(stack, answer, settled, original, where)
        else:
            for value, given in zip(node.outputs, task.answer):
                final = settled[value] = settled.get(given, given)
                if value in uses:
                    uses[final] = uses.get(final, 1) + uses[value] - 1
    return Graph(graph.name, graph.inputs, tuple(settled.get(v, v) for v in graph.outputs))


def _enter(stack: list[_Task], values: Sequence[Value | None], settled: Mapping[Value, Value],
           original: set[Node], where: str | None) -> None:
    for value in reversed(values):
        if value is not None and value.node is not None and value not in settled:
            own = value.node in original
            stack.append(_Task(value.node, None if own else where))
