"""A whole FX graph as one Python function: our segments, torch's calls in between, views.

The function is written as source and compiled, so that a call does nothing that could have been
done before. It takes its arguments in a list that it empties (torch's boxed convention), and
forgets every tensor after its last use.
"""

from __future__ import annotations

import logging
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._sympy.printers import PythonPrinter

from terrazzo.errors import TerrazzoError, UnsupportedOperator
from terrazzo.torch.aten.shapes import PARTS
from terrazzo.torch.convert import is_tangent, read_number, refusal
from terrazzo.torch.entry import (
    as_saved,
    held,
    laid,
    laid_in_order,
    made_function,
    reinterpret,
)
from terrazzo.torch.options import BackendOptions
from terrazzo.torch.placement import (
    FORMS,
    Placement,
    Reason,
    base_of,
    is_scalar,
    place,
    root_of,
)
from terrazzo.torch.segment import Piece, Segment, is_dense, order_of, symbols_of

log = logging.getLogger("terrazzo.torch")


@dataclass(frozen=True, eq=False)
class Program:
    """A compiled FX graph."""

    name: str
    module: GraphModule
    placement: Placement
    segments: tuple[Segment, ...]
    run: Callable[[list[Any]], Sequence[Any]]
    source: str
    scope: Mapping[str, Any]  # what the source names
    calls: int  # of torch in between, in one run

    @property
    def reasons(self) -> list[Reason]:
        """Why there are calls of torch in between."""
        return list(self.placement.reasons.values())


def compiled(gm: GraphModule, name: str, options: BackendOptions,
             frozen: Mapping[Node, Any] | None = None,
             saved: Sequence[Node] = (), looks: bool = True) -> Program:
    """A program for a graph; what our compiler refuses is placed in torch, and tried again.

    `saved` are arguments that may come in other strides than those that torch said; `looks` says
    that an index out of bounds is an error.
    """
    forced: dict[Node, str] = {}
    while True:
        placement = place(gm, forced)
        # Copies into arguments are what AOTAutograd ends a graph with, and no call of the user's.
        calls = {n: r for n, r in placement.reasons.items()
                 if n.target is not torch.ops.aten.copy_.default}
        if options.fallback == "error" and calls:
            raise _unsupported(list(calls.values()))
        writer = _Writer(gm, name, placement, options, frozen or {}, saved, looks)
        try:
            program = writer.written()
        except _Refused as refused:
            if options.fallback == "error":
                raise refused.error from None
            why = f"{type(refused.error).__name__}: {str(refused.error).splitlines()[0]}"
            forced.update((node, why) for node in refused.nodes)
            continue
        _tell(program)
        return program


def _unsupported(reasons: Sequence[Reason]) -> UnsupportedOperator:
    reason, others = reasons[0], len(reasons) - 1
    return UnsupportedOperator(
        f"{reason.operator} cannot be compiled: {reason.why}"
        + (f", and {others} more calls" if others else ""), where=reason.where or None,
        hint="without options={'fallback': 'error'} torch runs it in between")


def _tell(program: Program) -> None:
    """One line about what torch runs, where anything does."""
    if not program.placement.reasons:
        log.debug("%s: %d segment(s), nothing left to torch", program.name, len(program.segments))
        return
    shown = "; ".join(sorted({str(r) for r in program.reasons})[:8])
    log.info("%s: %d segment(s), %d call(s) of torch in between: %s", program.name,
             len(program.segments), program.calls, shown)


class _Refused(Exception):
    """Our compiler refused a piece, and these are its nodes."""

    def __init__(self, nodes: Sequence[Node], error: Exception):
        super().__init__(str(error))
        self.nodes, self.error = nodes, error


@dataclass(eq=False)
class _Writer:
    """Writes the function of a program."""

    gm: GraphModule
    name: str
    placement: Placement
    options: BackendOptions
    frozen: Mapping[Node, Any]
    saved: Sequence[Node]
    looks: bool
    lines: list[str] = field(default_factory=list)
    scope: dict[str, Any] = field(default_factory=dict)
    held: dict[Node, str] = field(default_factory=dict)  # nodes and the variables that hold them
    segments: list[Segment] = field(default_factory=list)
    symbol_sources: dict[str, str] = field(default_factory=dict)  # an expression for each symbol
    stored: dict[Node, str] = field(default_factory=dict)  # copies that a segment made needless
    calls: int = 0

    # ------------------------------------------------------------ the whole
    def written(self) -> Program:
        placeholders = [n for n in self.gm.graph.nodes if n.op == "placeholder"]
        self.held.update((n, f"a{i}") for i, n in enumerate(placeholders))
        self.lines += [f"{self.held[n]} = {self.held[n]}.resolve_conj().resolve_neg()"
                       for n in placeholders if is_tangent(n)
                       and isinstance(n.meta.get("val"), torch.Tensor)]
        self.symbol_sources = self._symbol_sources(placeholders)
        for node in self.saved:
            self._look(node)
        output = next(n for n in self.gm.graph.nodes if n.op == "output")
        for level in self.placement.levels:
            nodes = [n for n, at in self.placement.level.items() if at == level]
            if level % 2 == 0:
                self.segment(nodes)
            else:
                for node in nodes:
                    self.torch_call(node)
        results = [self.variable(n) if isinstance(n, Node) else self.literal(n)
                   for n in output.args[0]]
        self.lines.append(f"return ({''.join(f'{r}, ' for r in results)})")
        source = self._source(placeholders)
        return Program(self.name, self.gm, self.placement, tuple(self.segments),
                       made_function(self.name, source, self.scope), source, self.scope, self.calls)

    def _source(self, placeholders: Sequence[Node]) -> str:
        names = [self.held[n] for n in placeholders]
        head = [f"{', '.join(names)}, = args"] if names else []
        body = [*head, "args.clear()", *_forgetting(self.lines)]
        return "\n".join(["def run(args):", *(f"    {line}" for line in body)])

    def _symbol_sources(self, placeholders: Sequence[Node]) -> dict[str, str]:
        """Where the value of each symbol is found, as an expression."""
        found: dict[str, str] = {}
        for node in placeholders:
            val = node.meta.get("val")
            if isinstance(val, torch.SymInt) and val.node.expr.is_Symbol:
                found[val.node.expr.name] = self.held[node]
        for node in placeholders:
            self._note_sizes(node, found)
        return found

    def _note_sizes(self, node: Node, found: dict[str, str]) -> None:
        val = node.meta.get("val")
        if not isinstance(val, torch.Tensor):
            if isinstance(val, torch.SymInt) and val.node.expr.is_Symbol:
                found.setdefault(val.node.expr.name, self.held[node])
            return
        for axis, n in enumerate(val.shape):
            if isinstance(n, torch.SymInt) and n.node.expr.is_Symbol:
                name = n.node.expr.name
                if name not in found:  # a tensor may be forgotten before the size is asked for
                    found[name] = f"size_{name}"
                    self.lines.append(f"size_{name} = {self.held[node]}.shape[{axis}]")

    # ------------------------------------------------------------ pieces
    def segment(self, nodes: Sequence[Node]) -> None:
        inside = dict.fromkeys(nodes)
        for node in list(self.gm.graph.nodes):  # results of calls with several
            if node.target is operator.getitem and node.args[0] in inside:
                inside[node] = None
        outputs = self.outputs(inside)
        wanted: dict[Node, None] = {}
        inputs: dict[Node, None] = {}
        stack = list(outputs)
        while stack:
            node = stack.pop()
            if node in wanted or node in inputs:
                continue
            if node.op == "get_attr" or is_scalar(node):
                read = read_number(node)
                stack += [read] if read is not None else []
                continue
            if node not in inside and not self.is_outside_view(node):
                inputs[node] = None
                continue
            wanted[node] = None
            stack += node.all_input_nodes
        if not outputs:
            return
        order = [n for n in self.gm.graph.nodes if n in wanted]
        given = [n for n in self.gm.graph.nodes if n in inputs]
        symbols = symbols_of([*order, *given])
        hints = {s: v for s, v in self.placement.hints.items() if s in symbols}
        number = len(self.segments)
        piece = Piece(f"{self.name}_{number}" if number else self.name, self.gm, tuple(order),
                      tuple(given), tuple(outputs), hints,
                      frozenset(symbols & self.placement.unbacked),
                      {} if symbols else self.replaced(inside, outputs, given), self.looks)
        try:
            made = Segment(piece, self.options,
                           {n: t for n, t in self.frozen.items() if n in inputs})
        except (TerrazzoError, *FORMS) as error:
            raise _Refused([n for n in order if n.target is not operator.getitem], error) from error
        self.segments.append(made)
        self._segment_line(made, number)

    def _segment_line(self, made: Segment, number: int) -> None:
        piece = made.piece
        arguments = [self.variable(n) for n in piece.inputs]
        targets = [self.name_of(n) for n in piece.outputs]
        for node, argument in made.written_over.items():
            self.stored.update({user: self.held[node] for user in _copies(node)
                                if user.args[0] is argument})
        symbols = piece.symbols
        if symbols:
            self.scope[f"segment{number}"] = made
            sizes = ", ".join(self.symbol_sources[s] for s in symbols)
            arguments.insert(0, f"({sizes},)")
        else:
            self.scope[f"segment{number}"] = made.find(())
        self.lines.append(f"{', '.join(targets)}, = segment{number}({', '.join(arguments)})")
        for node in piece.outputs:
            self._note_sizes(node, self.symbol_sources)

    def outputs(self, inside: Mapping[Node, None]) -> list[Node]:
        """What a segment stores: of views, where it pays or has to be, what they are views of."""
        asked = [n for n in inside if not isinstance(n.meta.get("val"), (tuple, list))
                 and any(self._is_used(user, inside) for user in n.users)]
        found = dict.fromkeys(n for n in asked if root_of(n, self.placement.reasons) is n)
        views = [n for n in asked if n not in found]
        roots = [root_of(n, self.placement.reasons) for n in views]
        for node, root in zip(views, roots):
            dense = is_dense(root.meta["val"])
            if dense and (root in found or roots.count(root) > 1
                          or not is_dense(node.meta["val"])):
                found[root] = None
            else:
                found[node] = None
        return [n for n in inside if n in found]

    def replaced(self, inside: Mapping[Node, None], outputs: Sequence[Node],
                 given: Sequence[Node]) -> dict[Node, Node]:
        """The outputs that take the place of arguments which nobody reads after this segment."""
        level = max((self.placement.level[n] for n in inside if n in self.placement.level),
                    default=0)
        return {node: copy.args[0] for node in outputs for copy in _copies(node)
                if copy.args[0] in given and _lie_alike(copy.args[0], node)
                and all(user is copy or self.is_before(user, level) for user in
                        copy.args[0].users)}

    def is_before(self, user: Node, level: int) -> bool:
        """Whether a node is computed by the end of a segment, and is no view of its argument."""
        return root_of(user, self.placement.reasons) is user and (
            self.placement.level.get(user, level + 1) <= level)

    def _is_used(self, user: Node, inside: Mapping[Node, None]) -> bool:
        if user.op == "output" or user in self.placement.reasons:
            return True
        if user in inside or is_scalar(user):
            return is_scalar(user) and user in self.placement.level
        return user in self.placement.level or user.target is operator.getitem

    def is_outside_view(self, node: Node) -> bool:
        """Whether a node is a view of what is held outside of segments."""
        return (node.op == "call_function" and node not in self.placement.level
                and node not in self.placement.reasons and node.target is not operator.getitem)

    # ------------------------------------------------------------ torch's calls
    def torch_call(self, node: Node) -> None:
        if node in self.stored:
            self.held[node] = self.stored[node]
            return
        self.calls += not is_scalar(node)
        self._call_line(node)
        val = node.meta.get("val")
        parts = [u for u in node.users if u.target is operator.getitem]
        for part in [node] if isinstance(val, torch.Tensor) else parts:
            if isinstance(part.meta.get("val"), torch.Tensor):
                self._lay(part)
        self._note_sizes(node, self.symbol_sources)

    def _lay(self, node: Node) -> None:
        """Hold what torch answered in the strides that it said; not all calls take heed of it."""
        fake = node.meta["val"]
        if refusal(fake) is not None or _is_view(node):
            return
        name = self.variable(node)
        strides = tuple(fake.stride())
        fixed = all(isinstance(n, int) for n in (*fake.shape, *strides))
        if fixed and any(self.placement.level.get(user, 1) % 2 == 0 for user in node.users):
            self._laid(name, held, strides, tuple(fake.shape), str(node))
        elif fixed:
            self._laid(name, laid, strides)
        else:
            self._laid(name, laid_in_order, order_of(fake))

    def _look(self, node: Node) -> None:
        """Have a saved tensor as the backward pass was made for, whatever a hook made of it."""
        fake, name = node.meta["val"], self.held[node]
        shape, strides = self._sizes(fake.shape), self._sizes(fake.stride())
        if not fake.dim():
            return
        if shape is None or strides is None:
            if is_dense(fake):
                self._laid(name, laid_in_order, order_of(fake))
            return
        self.scope["as_saved"] = as_saved
        self.lines.append(f"if {name}.stride() != {strides} or {name}.shape != {shape}: "
                          f"{name} = as_saved({name}, {shape}, {strides})")

    def _sizes(self, sizes: Sequence[Any]) -> str | None:
        """The tuple of some sizes as source; None where it takes more than arithmetic."""
        texts = []
        for n in sizes:
            text = str(n) if isinstance(n, int) else PythonPrinter().doprint(n.node.expr)
            names = set(re.findall(r"[A-Za-z_]\w*", text))
            if not names <= self.symbol_sources.keys():
                return None
            texts.append(re.sub(r"[A-Za-z_]\w*", lambda m: self.symbol_sources[m[0]], text))
        return f"({''.join(f'{text}, ' for text in texts)})"

    def _laid(self, name: str, lay: Callable[..., Any], *how: Any) -> None:
        """Hold a tensor as this function lays it."""
        number = len(self.scope)
        self.scope[f"lay_{number}"], self.scope[f"as_{number}"] = lay, how
        self.lines.append(f"{name} = lay_{number}({name}, *as_{number})")

    def literal(self, arg: Any) -> str:
        """An argument as source."""
        if isinstance(arg, Node):
            return self.variable(arg)
        if isinstance(arg, (list, tuple)):
            inner = ", ".join(self.literal(a) for a in arg)
            return f"[{inner}]" if isinstance(arg, list) else f"({inner}{',' * bool(arg)})"
        if arg is None or isinstance(arg, (bool, int, str)):
            return repr(arg)
        name = f"value_{len(self.scope)}"
        self.scope[name] = arg
        return name

    # ------------------------------------------------------------ variables
    def name_of(self, node: Node) -> str:
        return self.held.setdefault(node, f"v{len(self.held)}")

    def variable(self, node: Node) -> str:
        """The variable that holds a node, made now where that is cheap."""
        if node in self.held:
            return self.held[node]
        if node.op == "get_attr":
            self.scope[f"attribute_{node.name}"] = operator.attrgetter(str(node.target))(self.gm)
            self.held[node] = f"attribute_{node.name}"
        elif base_of(node, self.placement.reasons) is not None:
            self._view(node)
        elif node.target is operator.getitem:
            source, index = node.args
            held = self.variable(source)
            self.lines.append(f"{self.name_of(node)} = {held}[{self.literal(index)}]")
            self._note_sizes(node, self.symbol_sources)
        elif str(node.target) in PARTS and node not in self.placement.reasons:
            self._call_line(node)  # views of what is held, whose sizes vary
        else:
            assert is_scalar(node), f"{node.name} is computed after it is used"
            self.torch_call(node)
        return self.held[node]

    def _view(self, node: Node) -> None:
        """A view of something held, made by what torch knew of its layout."""
        root = root_of(node, self.placement.reasons)
        base = self.variable(root)
        fake, under = node.meta["val"], root.meta["val"]
        sizes = [*fake.shape, *fake.stride(), fake.storage_offset(), under.storage_offset()]
        if reinterpret is None or fake.dtype is not under.dtype or not all(
                isinstance(n, int) for n in sizes):
            self._call_line(node)
            return
        number = len(self.scope)
        self.scope |= {f"view_{number}": reinterpret, f"shape_{number}": tuple(fake.shape),
                       f"strides_{number}": tuple(fake.stride())}
        offset = fake.storage_offset() - under.storage_offset()
        self.lines.append(f"{self.name_of(node)} = view_{number}({base}, shape_{number}, "
                          f"strides_{number}, {offset})")

    def _call_line(self, node: Node) -> None:
        function = f"torch_{len(self.scope)}"
        self.scope[function] = node.target
        args = [self.literal(a) for a in node.args]
        args += [f"{k}={self.literal(v)}" for k, v in node.kwargs.items()]
        self.lines.append(f"{self.name_of(node)} = {function}({', '.join(args)})")


def _copies(node: Node) -> list[Node]:
    """Calls that put a value into an argument of the graph: what changes there, AOTAutograd says
    at the end."""
    return [user for user in node.users if user.target is torch.ops.aten.copy_.default
            and user.args[1] is node and user.args[0].op == "placeholder"]


def _lie_alike(node: Node, other: Node) -> bool:
    a, b = node.meta["val"], other.meta["val"]
    return is_dense(a) and a.numel() > 0 and (a.dtype, a.device, a.shape, a.stride()) == (
        b.dtype, b.device, b.shape, b.stride())


def _is_view(node: Node) -> bool:
    """Whether a call's result is memory of its argument: AOTAutograd finds it there again."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def _forgetting(lines: Sequence[str]) -> list[str]:
    """The lines, with each variable of a tensor forgotten after the line that last uses it."""
    last: dict[str, int] = {}
    for i, line in enumerate(lines):
        for name in re.findall(r"\b[av]\d+\b", line):
            last[name] = i
    done: dict[int, list[str]] = {}
    for name, i in last.items():
        done.setdefault(i, []).append(name)
    made = []
    for i, line in enumerate(lines):
        made.append(line)
        gone = done.get(i, [])
        if gone and not line.startswith("return"):
            made.append(f"del {', '.join(gone)}")
    return made
