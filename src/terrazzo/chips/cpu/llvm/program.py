"""A whole executable as one LLVM module: its kernels and one native `run` that calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from terrazzo.chips.cpu.llvm.builder import Builder, Module, Val, const
from terrazzo.chips.cpu.llvm.expressions import Scope
from terrazzo.chips.cpu.llvm.kernel import write_function
from terrazzo.chips.cpu.llvm.loops import STATUS, LoopEmitter
from terrazzo.chips.spec import ChipSpec
from terrazzo.index import Var
from terrazzo.loop.steps import Argument, Branch, Call, Flag, Recipe, Repeat, Step
from terrazzo.runtime.layout import NUMPY_DATA

# LLVM's time for a function of branches grows with their square.
_STEPS_OF_A_PART = 64
# Of the direct entries; beyond that callers pass an array of slots, which takes longer to fill: an
# imputer of scikit-learn, twenty parts of 13 to 30 arguments, took 1.4 to 1.6 times as long in all.
MOST_ARGUMENTS = 40


def module_of(recipe: Recipe, chip: ChipSpec) -> Module:
    """The module of an executable. It exports

    - `tz_run(ptr slots, ptr arena, i64 threads, ptr clock)`, where slots holds the addresses of
      inputs and outputs, then the sizes; clock is null or room for a time stamp a step and one;
    - `tz_constants`, an array of addresses that the loader fills;
    - `tz_call_pointers` and `tz_call_numpy`: the same run with addresses, or numpy array objects,
      as direct arguments before the sizes, arena and threads (only up to a few).
    """
    module, slots, dims = Module(chip.features), recipe.slots, recipe.dims
    for function in recipe.functions:
        write_function(module, chip, function)
    module.global_(STATUS, "i64", "0", linkage="")
    module.global_("tz_constants", f"[{max(recipe.constants, 1)} x ptr]", "zeroinitializer",
                   linkage="")
    _write_main(module, chip, recipe.steps, slots, dims)
    b = Builder(module, "tz_run", [("ptr", "slots"), ("ptr", "arena"), ("i64", "threads"),
                                   ("ptr", "clock")])
    values = [b.load("ptr" if i < slots else "i64", b.gep("i64", b.params[0], i), 8)
              for i in range(slots + len(dims))]
    b.call("void", "tz_main", [*values, *b.params[1:]])
    b.ret()
    if is_direct(recipe):
        for name, unwrap in (("tz_call_pointers", False), ("tz_call_numpy", True)):
            params = [("ptr", f"a{i}") for i in range(slots)]
            params += [("i64", f"d{i}") for i in range(len(dims))]
            b = Builder(module, name, [*params, ("ptr", "arena"), ("i64", "threads")])
            given = b.params[:slots]
            if unwrap:
                given = [b.load("ptr", b.gep("i8", p, NUMPY_DATA), 8) for p in given]
            b.call("void", "tz_main", [*given, *b.params[slots:], const("ptr", 0)])
            b.ret()
    return module


def is_direct(recipe: Recipe) -> bool:
    """Whether its module has the direct entries."""
    return recipe.slots + len(recipe.dims) <= MOST_ARGUMENTS


def _write_main(module: Module, chip: ChipSpec, steps: Sequence[Step], slots: int,
                dims: Sequence[Var]) -> None:
    """The function that runs all steps, in parts where there are many."""
    params = [("ptr", f"s{i}") for i in range(slots)] + [("i64", f"d{i}") for i in
                                                          range(len(dims))]
    params += [("ptr", "arena"), ("i64", "threads"), ("ptr", "clock")]
    if len(steps) <= _STEPS_OF_A_PART:
        _write_part(module, chip, "tz_main", params, steps, slots, dims, 0)
        return
    starts = range(0, len(steps), _STEPS_OF_A_PART)
    for at in starts:
        _write_part(module, chip, f"tz_part{at}", params, steps[at:at + _STEPS_OF_A_PART], slots,
                    dims, at)
    b = Builder(module, "tz_main", params, linkage="internal", attrs="nounwind noinline")
    for at in starts:
        b.call("void", f"tz_part{at}", b.params)
    b.ret()


def _write_part(module: Module, chip: ChipSpec, name: str, params: Sequence[tuple[str, str]],
                steps: Sequence[Step], slots: int, dims: Sequence[Var], first: int) -> None:
    """A function that runs some steps, of which the first has this number."""
    b = Builder(module, name, params, linkage="internal", attrs="nounwind noinline")
    *given, arena, threads, clock = b.params
    emitter = LoopEmitter(module, chip, name)
    emitter.b = b
    writer = _Steps(emitter, given[:slots], arena, threads)
    sizes = dict(zip(dims, given[slots:], strict=True))
    timed = b.icmp("ne", b.cast("ptrtoint", clock, "i64"), 0)

    def stamp(i: int) -> None:
        def write() -> None:
            now = b.call("i64", "llvm.readcyclecounter", [])
            b.store(now, b.gep("i64", clock, i), 8)

        b.if_(timed, write)

    if first == 0:
        stamp(0)
    for i, step in enumerate(steps, first):
        writer.write(step, Scope(sizes, {}))
        stamp(i + 1)
    b.ret()


@dataclass(frozen=True, eq=False)
class _Steps:
    """Writes steps into the function that runs them."""

    emitter: LoopEmitter
    slots: Sequence[Val]
    arena: Val
    threads: Val

    def write(self, step: Step, scope: Scope) -> None:
        b = self.emitter.b
        if isinstance(step, Call):
            pointers = [self.resolve(a, scope) for a in step.arguments]
            extra = [scope.env[d] for d in step.function.dims]
            b.call("void", f"{step.function.name}.main", [*pointers, *extra, self.threads])
        elif isinstance(step, Branch):
            b.if_(self.holds(step.flag, scope), self.all(step.then, scope),
                  self.all(step.orelse, scope))
        else:
            self.repeat(step, scope)

    def all(self, steps: Sequence[Step], scope: Scope) -> Callable[[], None]:
        def write() -> None:
            for step in steps:
                self.write(step, scope)

        return write

    def resolve(self, argument: Argument, scope: Scope) -> Val:
        b = self.emitter.b
        if argument.kind == "slot":
            base = self.slots[argument.number]
        elif argument.kind == "constant":
            table = Val("ptr", ("@tz_constants",))
            base = b.load("ptr", b.gep("ptr", table, argument.number), 8)
        else:
            base = self.arena
        if argument.offset == 0 and argument.kind != "arena":
            return base
        return b.gep("i8", base, self.emitter.index(argument.offset, scope))

    def holds(self, flag: Flag, scope: Scope) -> Val:
        b = self.emitter.b
        found = b.load(f"i{8 * flag.bytes}", self.resolve(flag.place, scope), flag.bytes)
        return b.icmp("ne", found, 0)

    def repeat(self, step: Repeat, scope: Scope) -> None:
        b = self.emitter.b
        turns = b.alloca("i64", 1, 8)
        b.store(const("i64", 0), turns, 8)
        test, body, done = (b.new_label(name) for name in ("test", "again", "done"))
        b.br(test)
        b.start_block(test)
        counter = b.load("i64", turns, 8)
        inside = replace(scope, env={**scope.env, step.counter: counter})
        if step.flag is None:
            goes_on = b.icmp("slt", counter, self.emitter.index(step.count, scope))
        else:
            self.all(step.test, inside)()
            goes_on = self.holds(step.flag, inside)
        b.cond_br(goes_on, body, done)
        b.start_block(body)
        self.all(step.body, inside)()
        b.store(b.add(counter, 1), turns, 8)
        b.br(test)
        b.start_block(done)
        self.all(step.after, inside)()
