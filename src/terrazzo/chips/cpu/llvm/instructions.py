"""LLVM instructions as text: names, bundles, value numbering, arithmetic, calls (`builder.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from terrazzo.chips.cpu.llvm.module import Module
from terrazzo.chips.cpu.llvm.values import (
    Operand,
    Val,
    const,
    type_suffix,
    vec,
)

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


class Instructions:
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
