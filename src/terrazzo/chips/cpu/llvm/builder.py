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

# Which types an overloaded intrinsic's name spells out: 'r' the result, a number that argument.
# Everything not listed spells out its result.
_MANGLING: dict[str, tuple[str | int, ...]] = {
    "llvm.fptosi.sat": ("r", 0),
    "llvm.fptoui.sat": ("r", 0),
    "llvm.ldexp": ("r", 1),
    "llvm.powi": ("r", 1),
    "llvm.is.fpclass": (0,),
    "llvm.masked.load": ("r", 0),
    "llvm.masked.store": (0, 1),
    "llvm.masked.gather": ("r", 0),
    "llvm.masked.scatter": (0, 1),
    "llvm.prefetch": (0,),
    "llvm.memcpy": (0, 1, 2),
    "llvm.memmove": (0, 1, 2),
    "llvm.memset": (0, 2),
    "llvm.assume": (),
    "llvm.trap": (),
    "llvm.readcyclecounter": (),
}

# Intrinsics that have effects, or whose results change; those with attributes touch memory.
_EFFECTS = frozenset({
    "llvm.prefetch", "llvm.memcpy", "llvm.memmove", "llvm.memset", "llvm.assume", "llvm.trap",
    "llvm.readcyclecounter",
})

# Attributes of functions that only hand things on: making them fast would be all they cost.
HANDS_ON = "nounwind noinline optnone"

_INT_FOLDS: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "sdiv": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "srem": lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
    "udiv": lambda a, b: (a & _MASK64) // (b & _MASK64),
    "urem": lambda a, b: (a & _MASK64) % (b & _MASK64),
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "shl": lambda a, b: a << b,
    "lshr": lambda a, b: (a & _MASK64) >> b,
    "ashr": lambda a, b: a >> b,
}
_MASK64 = (1 << 64) - 1
_DIVISIONS = frozenset({"sdiv", "udiv", "srem", "urem"})
# x op neutral == x
_NEUTRAL = {
    "add": 0, "sub": 0, "or": 0, "xor": 0, "shl": 0, "lshr": 0, "ashr": 0,
    "mul": 1, "sdiv": 1, "udiv": 1, "and": -1,
}  # fmt: skip
_COMMUTATIVE = frozenset({"add", "mul", "and", "or", "xor"})

_COMPARE_FOLDS: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "slt": lambda a, b: a < b,
    "sle": lambda a, b: a <= b,
    "sgt": lambda a, b: a > b,
    "sge": lambda a, b: a >= b,
    "ult": lambda a, b: a & _MASK64 < b & _MASK64,
    "ule": lambda a, b: a & _MASK64 <= b & _MASK64,
    "ugt": lambda a, b: a & _MASK64 > b & _MASK64,
    "uge": lambda a, b: a & _MASK64 >= b & _MASK64,
}


def _as_bits(ty: str) -> str:
    """The integers to move half types as: LLVM takes masked ones apart by way of float32, and
    others lane by lane where their arithmetic is not the processor's own."""
    return ty.replace("bfloat", "i16").replace("half", "i16")


class Builder:
    """One function being written: methods append instructions to the current block.

    Operands may be Python numbers where another operand gives the type; an index or a bound that
    is a Python int has type i64.
    """

    def __init__(
        self,
        module: Module,
        name: str,
        params: Sequence[tuple[str, str]],
        ret: str = "void",
        attrs: str = "nounwind",
        linkage: str = "",
    ) -> None:
        self.module = module
        self.name = name
        self.ret_ty = ret
        self.block = "entry"
        # A parameter's type may carry attributes ("ptr noalias"); its value's type may not.
        self.params = [
            Val("ptr" if ty.startswith("ptr") else ty, (f"%{pname}",)) for ty, pname in params
        ]
        signature = ", ".join(f"{ty} %{pname}" for ty, pname in params)
        self._head = " ".join(
            part for part in ("define", linkage, ret, f"@{name}({signature})", attrs, "{") if part
        )
        self._lines: list[str] = []
        self._allocas: list[str] = []
        self._next = 0
        self._callees: set[str] = set()
        self._templates: dict[tuple[str, str], str] = {}
        self._numbers: dict[str, str] = {}  # instructions whose results are known here
        self._trail: list[str] = []  # the keys of the above, in the order they came
        module.define(self)

    def text(self) -> str:
        """This function as LLVM IR."""
        return "\n".join([self._head, "entry:", *self._allocas, *self._lines, "}"])

    # -- the machinery: names, bundles, instructions ------------------------------------------

    @property
    def length(self) -> int:
        """How many lines have been written."""
        return len(self._lines)

    def _fresh(self) -> str:
        self._next += 1
        return f"%t{self._next}"

    def _pair(self, a: Operand, b: Operand) -> tuple[Val, Val]:
        if not isinstance(a, Val):
            a = const(b.ty if isinstance(b, Val) else "i64", a)
        if not isinstance(b, Val):
            b = const(a.ty, b)
        if a.ty != b.ty:
            raise TypeError(f"operands of different types in @{self.name}: {a.ty} and {b.ty}")
        return a, b

    def _index(self, value: Operand) -> Val:
        return value if isinstance(value, Val) else const("i64", value)

    def _numbered(self, instruction: str) -> str:
        """The name of an instruction's result, which is written unless it is known already."""
        name = self._numbers.get(instruction)
        if name is None:
            self._next += 1
            name = self._numbers[instruction] = f"%t{self._next}"
            self._trail.append(instruction)
            self._lines.append(f"  {name} = {instruction}")
        return name

    def _forget(self, mark: int) -> None:
        """Leave a block: what was numbered since the mark does not reach the code that follows."""
        for instruction in self._trail[mark:]:
            self._numbers.pop(instruction, None)
        del self._trail[mark:]

    def _each(self, ty: str, template: str, operands: Sequence[Val]) -> Val:
        """Emits `template.format(operand texts)` for each part of the operands' bundles."""
        count = max([len(value.parts) for value in operands])
        results = []
        for i in range(count):
            texts = [self._part(value, i, count) for value in operands]
            name = self._fresh()
            self._lines.append(f"  {name} = {template.format(*texts)}")
            results.append(name)
        return Val(ty, tuple(results))

    def _pure(self, ty: str, template: str, operands: Sequence[Val]) -> Val:
        """Like _each, for instructions that neither read memory nor have effects."""
        count = max([len(value.parts) for value in operands])
        if count == 1:
            return Val(ty, (self._numbered(
                template.format(*[value.parts[0] for value in operands])),))
        return Val(ty, tuple(self._numbered(template.format(
            *[self._part(value, i, count) for value in operands])) for i in range(count)))

    def _each_void(self, template: str, operands: Sequence[Val]) -> None:
        count = max((len(value.parts) for value in operands), default=1)
        for i in range(count):
            texts = [self._part(value, i, count) for value in operands]
            self._lines.append("  " + template.format(*texts))

    def _part(self, value: Val, i: int, count: int) -> str:
        parts = value.parts
        if len(parts) == 1:
            return parts[0]
        if len(parts) != count:
            raise ValueError(
                f"bundles of {len(parts)} and {count} in one operation of @{self.name}"
            )
        return parts[i]

    def _binary(self, head: str, a: Val, b: Val, ty: str) -> Val:
        """The hot path: one two-operand instruction per part."""
        pa, pb = a.parts, b.parts
        if len(pa) == 1 and len(pb) == 1:
            return Val(ty, (self._numbered(f"{head} {a.ty} {pa[0]}, {pb[0]}"),))
        count = max(len(pa), len(pb))
        if len(pa) == 1:
            pa = pa * count
        elif len(pb) == 1:
            pb = pb * count
        elif len(pa) != len(pb):
            raise ValueError(f"bundles of {len(pa)} and {len(pb)} in one operation of @{self.name}")
        return Val(ty, tuple(self._numbered(f"{head} {a.ty} {left}, {right}")
                             for left, right in zip(pa, pb)))

    # -- arithmetic ------------------------------------------------------------------------------

    def _floating(self, op: str, a: Operand, b: Operand, flags: str) -> Val:
        left, right = self._pair(a, b)
        return self._binary(f"{op} {flags}" if flags else op, left, right, left.ty)

    def fadd(self, a: Operand, b: Operand, flags: str = "") -> Val:
        return self._floating("fadd", a, b, flags)

    def fsub(self, a: Operand, b: Operand, flags: str = "") -> Val:
        return self._floating("fsub", a, b, flags)

    def fmul(self, a: Operand, b: Operand, flags: str = "") -> Val:
        return self._floating("fmul", a, b, flags)

    def fdiv(self, a: Operand, b: Operand, flags: str = "") -> Val:
        return self._floating("fdiv", a, b, flags)

    def frem(self, a: Operand, b: Operand, flags: str = "") -> Val:
        return self._floating("frem", a, b, flags)

    def fneg(self, a: Val) -> Val:
        return self._pure(a.ty, f"fneg {a.ty} {{}}", [a])

    def fma(self, a: Operand, b: Operand, c: Operand) -> Val:
        """a * b + c, rounded once."""
        a, b = self._pair(a, b)
        a, c = self._pair(a, c)
        ty = a.ty
        template = self._templates.get(("fma", ty))
        if template is None:
            name = f"llvm.fma.{type_suffix(ty)}"
            self.module.declare(name, ty, [ty] * 3)
            template = f"call {ty} @{name}({ty} {{}}, {ty} {{}}, {ty} {{}})"
            self._templates["fma", ty] = template
        return self._pure(ty, template, [a, b, c])

    def _as(self, ty: str, value: Operand) -> Val:
        return value if isinstance(value, Val) else const(ty, value)

    def _integer(self, op: str, a: Operand, b: Operand, flags: str = "") -> Val:
        left, right = self._pair(a, b)
        if left.ty == "i64":
            x, y = left.literal, right.literal
            if x is not None and y is not None and not (y == 0 and op in _DIVISIONS):
                return const("i64", _INT_FOLDS[op](x, y))
            if y is not None and _NEUTRAL.get(op) == y:
                return left
            if x is not None and op in _COMMUTATIVE and _NEUTRAL[op] == x:
                return right
            if op == "mul" and 0 in (x, y):
                return const("i64", 0)
        return self._binary(f"{op} {flags}" if flags else op, left, right, left.ty)

    def add(self, a: Operand, b: Operand, flags: str = "") -> Val:
        return self._integer("add", a, b, flags)

    def sub(self, a: Operand, b: Operand, flags: str = "") -> Val:
        return self._integer("sub", a, b, flags)

    def mul(self, a: Operand, b: Operand, flags: str = "") -> Val:
        return self._integer("mul", a, b, flags)

    def sdiv(self, a: Operand, b: Operand) -> Val:
        return self._integer("sdiv", a, b)

    def udiv(self, a: Operand, b: Operand) -> Val:
        return self._integer("udiv", a, b)

    def srem(self, a: Operand, b: Operand) -> Val:
        return self._integer("srem", a, b)

    def urem(self, a: Operand, b: Operand) -> Val:
        return self._integer("urem", a, b)

    def and_(self, a: Operand, b: Operand) -> Val:
        return self._integer("and", a, b)

    def or_(self, a: Operand, b: Operand) -> Val:
        return self._integer("or", a, b)

    def xor(self, a: Operand, b: Operand) -> Val:
        return self._integer("xor", a, b)

    def shl(self, a: Operand, b: Operand) -> Val:
        return self._integer("shl", a, b)

    def lshr(self, a: Operand, b: Operand) -> Val:
        return self._integer("lshr", a, b)

    def ashr(self, a: Operand, b: Operand) -> Val:
        return self._integer("ashr", a, b)

    def smin(self, a: Operand, b: Operand) -> Val:
        return self._extreme("llvm.smin", min, a, b)

    def smax(self, a: Operand, b: Operand) -> Val:
        return self._extreme("llvm.smax", max, a, b)

    def _extreme(self, name: str, fold: Callable[[int, int], int], a: Operand, b: Operand) -> Val:
        left, right = self._pair(a, b)
        x, y = left.literal, right.literal
        if x is not None and y is not None:
            return const(left.ty, fold(x, y))
        return self.intrinsic(name, [left, right], left.ty)

    def icmp(self, predicate: str, a: Operand, b: Operand) -> Val:
        left, right = self._pair(a, b)
        x, y = left.literal, right.literal
        if x is not None and y is not None:
            return const("i1", _COMPARE_FOLDS[predicate](x, y))
        return self._binary(f"icmp {predicate}", left, right, vec("i1", left.lanes))

    def fcmp(self, predicate: str, a: Operand, b: Operand) -> Val:
        left, right = self._pair(a, b)
        return self._binary(f"fcmp {predicate}", left, right, vec("i1", left.lanes))

    def select(self, condition: Val, a: Operand, b: Operand) -> Val:
        left, right = self._pair(a, b)
        known = condition.literal
        if known is not None:
            return left if known else right
        template = f"select {condition.ty} {{}}, {left.ty} {{}}, {left.ty} {{}}"
        return self._pure(left.ty, template, [condition, left, right])

    def cast(self, op: str, v: Val, elem: str) -> Val:
        """Converts each lane with an LLVM cast, or with a saturating fptosi.sat / fptoui.sat."""
        ty = vec(elem, v.lanes)
        if op in ("fptosi.sat", "fptoui.sat"):
            return self.intrinsic(f"llvm.{op}", [v], ty)
        if ty == v.ty and op == "bitcast":
            return v
        known = v.literal
        if known is not None and op in ("sext", "trunc"):
            return const(ty, known)
        return self._pure(ty, f"{op} {v.ty} {{}} to {ty}", [v])

    def bitcast(self, v: Val, ty: str) -> Val:
        """The same bits as another type, whose number of lanes may differ."""
        return v if ty == v.ty else self._pure(ty, f"bitcast {v.ty} {{}} to {ty}", [v])

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

    # -- calls -----------------------------------------------------------------------------------

    def call(
        self, ret: str, callee: str | Val, args: Sequence[Val], attrs: str = "", flags: str = "",
        pure: bool = False,
    ) -> Val:
        """Calls a function by name (declared when unknown) or by address."""
        types = [arg.ty for arg in args]
        if isinstance(callee, str):
            if callee not in self._callees:
                self._callees.add(callee)
                self.module.declare(callee, ret, types)
            target, operands = f"@{callee}", list(args)
        else:
            target, operands = "{}", [callee, *args]
        formals = ", ".join(f"{ty} {{}}" for ty in types)
        template = f"{ret} {target}({formals})"
        if flags:
            template = f"{flags} {template}"
        template = f"call {template} {attrs}".rstrip()
        if ret == "void":
            self._each_void(template, operands)
            return Val("void", ())
        if not operands:
            name = self._fresh()
            self._lines.append(f"  {name} = {template}")
            return Val(ret, (name,))
        return self._pure(ret, template, operands) if pure else self._each(ret, template, operands)

    def intrinsic(
        self,
        name: str,
        args: Sequence[Val],
        ret: str,
        flags: str = "",
        arg_attrs: dict[int, str] | None = None,
    ) -> Val:
        """Calls an LLVM intrinsic by its base name; the suffix for the types is added."""
        mangling = _MANGLING.get(name, ("r",))
        full = name
        for which in mangling:
            full += "." + type_suffix(ret if isinstance(which, str) else args[which].ty)
        if arg_attrs is None:
            return self.call(ret, full, args, flags=flags, pure=name not in _EFFECTS)
        if full not in self._callees:
            self._callees.add(full)
            self.module.declare(full, ret, [arg.ty for arg in args])
        formals = ", ".join(
            f"{arg.ty} {arg_attrs[i]} {{}}" if i in arg_attrs else f"{arg.ty} {{}}"
            for i, arg in enumerate(args)
        )
        template = f"call {ret} @{full}({formals})"
        if ret == "void":
            self._each_void(template, args)
            return Val("void", ())
        return self._each(ret, template, args)

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
