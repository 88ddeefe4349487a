"""A whole executable as one LLVM module: its kernels and one native `run` that calls them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from terrazzo.chips.spec import ChipSpec
from terrazzo.codegen.llvm.builder import Builder, Module, Val, const
from terrazzo.codegen.llvm.expressions import Scope
from terrazzo.codegen.llvm.kernel import write_function
from terrazzo.codegen.llvm.loops import STATUS, LoopEmitter
from terrazzo.index import Index, Var
from terrazzo.loop.ir import Function

NUMPY_DATA = 16  # where a numpy array object holds the address of its data (PyArrayObject)
MOST_ARGUMENTS = 12  # of the direct entries; beyond that callers pass an array of slots


@dataclass(frozen=True)
class Argument:
    """Where a kernel's argument comes from: a slot of the caller, a constant, or the arena."""

    kind: str  # slot | constant | arena
    number: int = 0
    offset: Index = 0


@dataclass(frozen=True, eq=False)
class Call:
    """One run of a kernel with its arguments; several calls may share a kernel."""

    function: Function
    arguments: tuple[Argument, ...]
    name: str  # of this call, for the profiler


def module_text(calls: Sequence[Call], slots: int, constants: int, dims: Sequence[Var],
                chip: ChipSpec) -> str:
    """The module of an executable. It exports

    - `tz_run(ptr slots, ptr arena, i64 threads, ptr clock)`, where slots holds the addresses of
      inputs and outputs, then the sizes; clock is null or room for a time stamp a kernel and one;
    - `tz_constants`, an array of addresses that the loader fills;
    - `tz_call_pointers` and `tz_call_numpy`: the same run with addresses, or numpy array objects,
      as direct arguments before the sizes, arena and threads (only up to a few).
    """
    module = Module(chip.features)
    for function in dict.fromkeys(c.function for c in calls):
        write_function(module, chip, function)
    module.global_(STATUS, "i64", "0", linkage="")
    module.global_("tz_constants", f"[{max(constants, 1)} x ptr]", "zeroinitializer",
                   linkage="")
    _write_main(module, chip, calls, slots, dims)
    b = Builder(module, "tz_run", [("ptr", "slots"), ("ptr", "arena"), ("i64", "threads"),
                                   ("ptr", "clock")])
    values = [b.load("ptr" if i < slots else "i64", b.gep("i64", b.params[0], i), 8)
              for i in range(slots + len(dims))]
    b.call("void", "tz_main", [*values, *b.params[1:]])
    b.ret()
    if slots + len(dims) <= MOST_ARGUMENTS:
        for name, unwrap in (("tz_call_pointers", False), ("tz_call_numpy", True)):
            params = [("ptr", f"a{i}") for i in range(slots)]
            params += [("i64", f"d{i}") for i in range(len(dims))]
            b = Builder(module, name, [*params, ("ptr", "arena"), ("i64", "threads")])
            given = b.params[:slots]
            if unwrap:
                given = [b.load("ptr", b.gep("i8", p, NUMPY_DATA), 8) for p in given]
            b.call("void", "tz_main", [*given, *b.params[slots:], const("ptr", 0)])
            b.ret()
    return module.text()


def _write_main(module: Module, chip: ChipSpec, calls: Sequence[Call], slots: int,
                dims: Sequence[Var]) -> None:
    params = [("ptr", f"s{i}") for i in range(slots)] + [("i64", f"d{i}") for i in
                                                          range(len(dims))]
    b = Builder(module, "tz_main", [*params, ("ptr", "arena"), ("i64", "threads"),
                                    ("ptr", "clock")], linkage="internal",
                attrs="nounwind noinline")
    *given, arena, threads, clock = b.params
    sizes = dict(zip(dims, given[slots:], strict=True))
    emitter = LoopEmitter(module, chip, "tz_main")
    emitter.b = b
    scope = Scope(sizes, {})

    def resolve(argument: Argument) -> Val:
        if argument.kind == "slot":
            return given[argument.number]
        if argument.kind == "constant":
            table = Val("ptr", ("@tz_constants",))
            return b.load("ptr", b.gep("ptr", table, argument.number), 8)
        return b.gep("i8", arena, emitter.index(argument.offset, scope))

    timed = b.icmp("ne", b.cast("ptrtoint", clock, "i64"), 0)

    def stamp(i: int) -> None:
        def write() -> None:
            now = b.call("i64", "llvm.readcyclecounter", [])
            b.store(now, b.gep("i64", clock, i), 8)

        b.if_(timed, write)

    stamp(0)
    for i, call in enumerate(calls):
        pointers = [resolve(a) for a in call.arguments]
        extra = [sizes[d] for d in call.function.dims]
        b.call("void", f"{call.function.name}.main", [*pointers, *extra, threads])
        stamp(i + 1)
    b.ret()
