"""Writes LLVM IR as text, quickly, with bundles of independent values as the basic operand.

A `Val` holds one operand or a *bundle* of several operands of one type. Every operation maps over
its bundles and emits one instruction per part, one part after the other, so that the dependency
chains of U vectors are interleaved instruction by instruction. This hides latency on in-order
schedulers and out-of-order cores alike, and costs the caller nothing: code is written as if for one
value.

Instructions without effects are written once where one of them reaches all its uses (value
numbering along the dominator tree), so callers need not remember what they computed, and LLVM has
less to read and to clean up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from terrazzo.chips.cpu.llvm.instructions import Instructions
from terrazzo.chips.cpu.llvm.module import Module
from terrazzo.chips.cpu.llvm.values import (
    Operand,
    Val,
    bundle,
    const,
    elem_of,
    iota,
    lanes_of,
    type_suffix,
    vec,
)

__all__ = [
    "HANDS_ON",
    "Builder",
    "Module",
    "Operand",
    "Val",
    "bundle",
    "const",
    "elem_of",
    "iota",
    "lanes_of",
    "vec",
]

# Attributes of functions that only hand things on: making them fast would be all they cost.
HANDS_ON = "nounwind noinline optnone"



def _as_bits(ty: str) -> str:
    """The integers to move half types as: LLVM takes masked ones apart by way of float32, and
    others lane by lane where their arithmetic is not the processor's own."""
    return ty.replace("bfloat", "i16").replace("half", "i16")


class Builder(Instructions):
    """One function being written, with memory, vectors and control flow."""

    # -- memory ----------------------------------------------------------------------------------

    def _hint(self, nontemporal: bool) -> str:
        return f", !nontemporal {self.module.metadata('!{i32 1}')}" if nontemporal else ""

    def load(
        self,
        ty: str,
        ptr: Val,
        align: int,
        nontemporal: bool = False,
        ordering: str = "",
        suffix: str = "",
    ) -> Val:
        """Loads a value; `ordering` makes it atomic, `suffix` adds metadata (see alias_domain)."""
        head = f"load atomic {ty}" if ordering else f"load {ty}"
        tail = f" {ordering}" if ordering else ""
        template = f"{head}, ptr {{}}{tail}, align {align}{self._hint(nontemporal)}{suffix}"
        return self._each(ty, template, [ptr])

    def store(
        self,
        v: Val,
        ptr: Val,
        align: int,
        nontemporal: bool = False,
        ordering: str = "",
        suffix: str = "",
    ) -> None:
        """Stores a value; `ordering` makes it atomic, `suffix` adds metadata (see alias_domain)."""
        if v.lanes > 1:
            v = self.bitcast(v, _as_bits(v.ty))
        head = f"store atomic {v.ty}" if ordering else f"store {v.ty}"
        tail = f" {ordering}" if ordering else ""
        template = f"{head} {{}}, ptr {{}}{tail}, align {align}{self._hint(nontemporal)}{suffix}"
        self._each_void(template, [v, ptr])

    def masked_load(self, ty: str, ptr: Val, mask: Val, passthru: Operand, align: int) -> Val:
        """Loads the lanes where the mask is set; the others come from passthru."""
        bits = _as_bits(ty)
        fill = self.bitcast(self._as(ty, passthru), bits)
        loaded = self.intrinsic("llvm.masked.load", [ptr, mask, fill], bits,
                                arg_attrs={0: f"align {align}"})
        return self.bitcast(loaded, ty)

    def masked_store(self, v: Val, ptr: Val, mask: Val, align: int) -> None:
        """Stores the lanes where the mask is set."""
        args = [self.bitcast(v, _as_bits(v.ty)), ptr, mask]
        self.intrinsic("llvm.masked.store", args, "void", arg_attrs={1: f"align {align}"})

    def masked_gather(
        self, ty: str, ptrs: Val, mask: Val, passthru: Operand, align: int = 1
    ) -> Val:
        """Loads each lane from its own address where the mask is set."""
        bits = _as_bits(ty)
        args = [ptrs, mask, self.bitcast(self._as(ty, passthru), bits)]
        loaded = self.intrinsic("llvm.masked.gather", args, bits, arg_attrs={0: f"align {align}"})
        return self.bitcast(loaded, ty)

    def masked_scatter(self, v: Val, ptrs: Val, mask: Val, align: int = 1) -> None:
        """Stores each lane to its own address where the mask is set."""
        args = [self.bitcast(v, _as_bits(v.ty)), ptrs, mask]
        self.intrinsic("llvm.masked.scatter", args, "void", arg_attrs={1: f"align {align}"})

    def gep(self, elem: str, ptr: Val, offset: Operand, inbounds: bool = True) -> Val:
        """The address `offset` elements after ptr; a vector offset gives a vector of addresses."""
        index = self._index(offset)
        if index.literal == 0:
            return ptr
        flag = "inbounds " if inbounds else ""
        ty = vec("ptr", max(ptr.lanes, index.lanes))
        template = f"getelementptr {flag}{elem}, {ptr.ty} {{}}, {index.ty} {{}}"
        return self._pure(ty, template, [ptr, index])

    def alloca(self, ty: str, count: int = 1, align: int = 64) -> Val:
        """Stack memory, reserved once in the entry block wherever this is called."""
        name = self._fresh()
        self._allocas.append(f"  {name} = alloca {ty}, i64 {count}, align {align}")
        return Val("ptr", (name,))

    def prefetch(self, ptr: Val, write: bool = False, locality: int = 3) -> None:
        """Asks for a cache line ahead of its use; locality 3 keeps it in the first level."""
        hints = [const("i32", int(write)), const("i32", locality), const("i32", 1)]
        self.intrinsic("llvm.prefetch", [ptr, *hints], "void")

    def memcpy(self, dst: Val, src: Val, size: Operand) -> None:
        args = [dst, src, self._index(size), const("i1", False)]
        self.intrinsic("llvm.memcpy", args, "void")

    def memset(self, dst: Val, byte: Operand, size: Operand) -> None:
        args = [dst, self._as("i8", byte), self._index(size), const("i1", False)]
        self.intrinsic("llvm.memset", args, "void")

    def fence(self, ordering: str = "seq_cst") -> None:
        self._lines.append(f"  fence {ordering}")

    def atomic_rmw(self, op: str, ptr: Val, v: Val, ordering: str = "seq_cst") -> Val:
        """Applies `op` (add, xchg, fadd, ...) to memory atomically. Returns the old value."""
        return self._each(v.ty, f"atomicrmw {op} ptr {{}}, {v.ty} {{}} {ordering}", [ptr, v])

    def compare_exchange(
        self, ptr: Val, expected: Val, new: Val, ordering: str = "seq_cst"
    ) -> tuple[Val, Val]:
        """Atomic compare and swap. Returns the old value and whether it was swapped."""
        ty = expected.ty
        template = f"cmpxchg ptr {{}}, {ty} {{}}, {ty} {{}} {ordering} monotonic"
        pair = self._each(f"{{{ty}, i1}}", template, [ptr, expected, new])
        old = self._each(ty, f"extractvalue {{{{{ty}, i1}}}} {{}}, 0", [pair])
        return old, self._each("i1", f"extractvalue {{{{{ty}, i1}}}} {{}}, 1", [pair])

    def fabs(self, v: Val) -> Val:
        return self.intrinsic("llvm.fabs", [v], v.ty)

    def sqrt(self, v: Val) -> Val:
        return self.intrinsic("llvm.sqrt", [v], v.ty)

    def copysign(self, magnitude: Operand, sign: Val) -> Val:
        return self.intrinsic("llvm.copysign", [self._as(sign.ty, magnitude), sign], sign.ty)

    # -- vectors ---------------------------------------------------------------------------------

    def undefined(self, ty: str) -> Val:
        """Any value, but the same one for all who use it."""
        return self._each(ty, f"freeze {ty} {{}}", [Val(ty, ("poison",))])

    def const(self, ty: str, value: float | bool) -> Val:
        """An exact literal; the same in all lanes of a vector type."""
        return const(ty, value)

    def iota(self, ty: str) -> Val:
        """The vector <0, 1, 2, ...>."""
        return iota(ty)

    def splat(self, v: Operand, lanes: int) -> Val:
        """A vector with a scalar in every lane (the scalar itself for one lane)."""
        v = self._index(v)
        if lanes == 1:
            return v
        bits = _as_bits(v.elem)
        if bits != v.elem:
            return self.bitcast(self.splat(self.bitcast(v, bits), lanes), vec(v.elem, lanes))
        ty = vec(v.elem, lanes)
        if all(part[0] not in "%@" for part in v.parts):
            return Val(ty, tuple(f"splat ({v.ty} {part})" for part in v.parts))
        first = self._pure(ty, f"insertelement {ty} poison, {v.ty} {{}}, i64 0", [v])
        template = f"shufflevector {ty} {{}}, {ty} poison, <{lanes} x i32> zeroinitializer"
        return self._pure(ty, template, [first])

    def insert(self, v: Val, scalar: Operand, index: Operand) -> Val:
        """The vector with one lane replaced."""
        item, at = self._as(v.elem, scalar), self._index(index)
        template = f"insertelement {v.ty} {{}}, {item.ty} {{}}, {at.ty} {{}}"
        return self._pure(v.ty, template, [v, item, at])

    def extract(self, v: Val, index: Operand) -> Val:
        """One lane of a vector (a scalar is its own only lane)."""
        if v.lanes == 1:
            return v
        at = self._index(index)
        return self._pure(v.elem, f"extractelement {v.ty} {{}}, {at.ty} {{}}", [v, at])

    def shuffle(self, a: Val, b: Val | None, mask: Sequence[int]) -> Val:
        """Picks lanes of a, then of b (poison when None); -1 leaves a lane undefined."""
        other = b if b is not None else Val(a.ty, ("poison",))
        if len(mask) == 1:
            lane = mask[0]
            return self.extract(a, lane) if lane < a.lanes else self.extract(other, lane - a.lanes)
        bits = _as_bits(a.ty)
        if bits != a.ty:
            moved = self.shuffle(self.bitcast(a, bits), None if b is None else self.bitcast(
                b, bits), mask)
            return self.bitcast(moved, vec(a.elem, len(mask)))
        lanes = ", ".join("i32 poison" if lane < 0 else f"i32 {lane}" for lane in mask)
        template = f"shufflevector {a.ty} {{}}, {a.ty} {{}}, <{len(mask)} x i32> <{lanes}>"
        return self._pure(vec(a.elem, len(mask)), template, [a, other])

    def reduce(self, kind: str, v: Val) -> Val:
        """Combines the lanes of a vector: add mul and or xor smax umin fadd fmul fmax fminimum."""
        if v.lanes == 1:
            return v
        name = f"llvm.vector.reduce.{kind}"
        if kind in ("fadd", "fmul"):
            # Any order of summation will do, so that it becomes a tree of shuffles.
            start = const(v.elem, -0.0 if kind == "fadd" else 1.0)
            return self._reduction(name, [start, v], v, "reassoc")
        return self._reduction(name, [v], v, "")

    def _reduction(self, name: str, args: Sequence[Val], v: Val, flags: str) -> Val:
        return self.call(v.elem, f"{name}.{type_suffix(v.ty)}", args, flags=flags, pure=True)

    def fold(self, combine: Callable[[Val, Val], Val], v: Val) -> Val:
        """Combines the parts of a bundle into one value, as a balanced tree."""
        values = v.split()
        while len(values) > 1:
            pairs = [combine(a, b) for a, b in zip(values[::2], values[1::2])]
            values = pairs + ([values[-1]] if len(values) % 2 else [])
        return values[0]

    # -- control flow ----------------------------------------------------------------------------

    def new_label(self, hint: str = "block") -> str:
        self._next += 1
        return f"{hint}{self._next}"

    def start_block(self, label: str) -> None:
        """Begin a block about which nothing is known; loops and branches below know more."""
        self._numbers.clear()
        self._open(label)

    def _open(self, label: str) -> None:
        self._lines.append(f"{label}:")
        self.block = label

    def br(self, label: str, suffix: str = "") -> None:
        self._lines.append(f"  br label %{label}{suffix}")

    def cond_br(self, condition: Val, then: str, orelse: str, suffix: str = "") -> None:
        self._lines.append(f"  br i1 {condition.text}, label %{then}, label %{orelse}{suffix}")

    def ret(self, v: Val | None = None) -> None:
        self._lines.append("  ret void" if v is None else f"  ret {v.ty} {v.text}")

    def unreachable(self) -> None:
        self._lines.append("  unreachable")

    def comment(self, text: str) -> None:
        self._lines.extend(f"  ; {line}" for line in text.splitlines())

    def phi(self, incoming: Sequence[tuple[Val, str]]) -> Val:
        """The value that came with the block we arrived from."""
        ty = incoming[0][0].ty
        count = max(value.count for value, _ in incoming)
        results = []
        for i in range(count):
            name = self._fresh()
            edges = ", ".join(f"[ {self._part(v, i, count)}, %{label} ]" for v, label in incoming)
            self._lines.append(f"  {name} = phi {ty} {edges}")
            results.append(name)
        return Val(ty, tuple(results))

    def loop(
        self,
        lo: Operand,
        hi: Operand,
        step: Operand,
        body: Callable[[Val, list[Val]], Sequence[Val] | None],
        carried: Sequence[Val] = (),
        hoist: bool = True,
    ) -> list[Val]:
        """Runs body(iv, carried) for iv in range(lo, hi, step), step positive.

        The body returns the new carried values; the loop returns the last ones. A loop known to
        run at most once is written without a branch, and one known to run tests at its end, which
        is a block less. Without `hoist`, LLVM leaves in the loop what stays the same in it.
        """
        low, high, stride = (self._index(x) for x in (lo, hi, step))
        first, last, jump = low.literal, high.literal, stride.literal
        if first is not None and last is not None:
            if first >= last:
                return list(carried)
            if jump is not None and first + jump >= last:
                return list(body(low, list(carried)) or ())
        runs = first is not None and last is not None
        header, inside, done = (self.new_label(hint) for hint in ("loop", "body", "done"))
        entered_from = self.block
        self.br(header)
        mark = len(self._trail)
        self._open(header)
        iv = Val(low.ty, (self._fresh(),))
        state = [Val(v.ty, tuple(self._fresh() for _ in v.parts)) for v in carried]
        phi_at = len(self._lines)
        self._lines.append("")
        if not runs:
            self.cond_br(self.icmp("slt", iv, high), inside, done)
            self._open(inside)
        updated = list(body(iv, list(state)) or ())
        if [v.ty for v in updated] != [v.ty for v in carried]:
            raise TypeError(
                f"loop body in @{self.name} returned {[v.ty for v in updated]}, "
                f"carried are {[v.ty for v in carried]}"
            )
        # Frozen, the counter is nothing that LLVM's strength reduction knows: addresses made of it
        # fit the chip's addressing modes as they are, and that pass took a quarter of code
        # generation.
        following = self._each(iv.ty, f"freeze {iv.ty} {{}}", [self.add(iv, stride)])
        latch, suffix = self.block, f", !llvm.loop {self.module.loop_metadata(hoist)}"
        if runs:
            self.cond_br(self.icmp("slt", following, high), header, done, suffix)
        else:
            self.br(header, suffix)
        phis = [(iv, low, following), *zip(state, carried, updated)]
        self._lines[phi_at] = "\n".join(
            f"  {name} = phi {var.ty} [ {start.parts[i]}, %{entered_from} ], "
            f"[ {self._part(new, i, var.count)}, %{latch} ]"
            for var, start, new in phis
            for i, name in enumerate(var.parts)
        )
        self._forget(mark)
        self._open(done)
        return updated if runs else state

    def if_(
        self,
        condition: Val,
        then: Callable[[], object],
        orelse: Callable[[], object] | None = None,
    ) -> None:
        """Runs one of two pieces of code; a condition known now leaves no branch."""

        def run(piece: Callable[[], object] | None) -> list[Val]:
            if piece is not None:
                piece()
            return []

        self._branch(condition, lambda: run(then), None if orelse is None else lambda: run(orelse))

    def if_values(
        self,
        condition: Val,
        then: Callable[[], Sequence[Val]],
        orelse: Callable[[], Sequence[Val]],
    ) -> list[Val]:
        """Like if_, for pieces that return values: the values of the piece that ran."""
        return self._branch(condition, then, orelse)

    def _branch(
        self,
        condition: Val,
        then: Callable[[], Sequence[Val]],
        orelse: Callable[[], Sequence[Val]] | None,
    ) -> list[Val]:
        known = condition.literal
        if known is not None:
            piece = then if known else orelse
            return list(piece()) if piece is not None else []
        yes, join = self.new_label("then"), self.new_label("join")
        no = self.new_label("else") if orelse is not None else join
        self.cond_br(condition, yes, no)
        mark = len(self._trail)
        self._open(yes)
        from_then = list(then())
        then_end = self.block
        self.br(join)
        self._forget(mark)
        from_else: list[Val] = []
        else_end = ""
        if orelse is not None:
            self._open(no)
            from_else = list(orelse())
            else_end = self.block
            self.br(join)
            self._forget(mark)
        self._open(join)
        if [v.ty for v in from_then] != [v.ty for v in from_else]:
            raise TypeError(f"the two sides of a branch in @{self.name} return different types")
        return [self.phi([(a, then_end), (b, else_end)]) for a, b in zip(from_then, from_else)]
