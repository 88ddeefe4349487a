"""Kernels that users write by hand, beside the generated one; the quicker of them runs.

    @squared_relu.kernel("cpu", language="c++")
    def _(x, alpha, beta):                      # types of the tensors, None for one not given
        if x.dtype != tz.float32:
            return None                         # not for these
        return "void kernel(const Tensor* in, Tensor* out) { ... }"

A call of the operator by itself may run it; inside a larger graph operators are fused, and what is
generated runs. Which one is quicker is measured once for each class of sizes.
"""

from __future__ import annotations

import inspect
import linecache
import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from terrazzo.base.nests import pack
from terrazzo.calls.arguments import Rebuild, type_of
from terrazzo.chips.by_hand import Kernel, Launch, Run
from terrazzo.chips.chip import Chip
from terrazzo.chips.registry import chip_named
from terrazzo.dtypes import DType, as_dtype, result_type
from terrazzo.errors import ArgumentError, MissingDependency
from terrazzo.graph.ir import Operator, TensorType
from terrazzo.knobs import knobs
from terrazzo.runtime.executable import Executable, empty
from terrazzo.runtime.hosted import to_numpy
from terrazzo.runtime.layout import row_major

ROUNDS = 5
MOST_SECONDS = 0.2  # what is slower than this is timed once
ELSEWHERE = {"triton": "a chip that runs Triton", "cuda": "a chip of NVIDIA's"}
_ENTRY = "tz_kernel"
# What each language that is text calls integers, and how it marks a function that is called.
_INTEGERS = {"c++": "#include <cstdint>\n", "cuda": "".join(
    f"typedef {sign}{kind} {sign and 'u'}int{bits}_t;\n" for sign in ("", "unsigned ")
    for bits, kind in ((8, "char" if sign else "signed char"), (16, "short"), (32, "int"),
                       (64, "long long")))}
_MARK = {"c++": "", "cuda": "__global__ "}
PRELUDE = """\
struct Tensor {
    void* data;            // row by row, without gaps; nullptr: not given
    int64_t rank;
    const int64_t* shape;
    template <class T> T* as() const { return static_cast<T*>(data); }
    int64_t size() const {
        int64_t count = 1;
        for (int64_t i = 0; i < rank; ++i) count *= shape[i];
        return count;
    }
};
"""


@dataclass(frozen=True, eq=False)
class Written:
    """A kernel by hand: the function that gives its source, and what that is for."""

    operator: Operator
    chip: str
    language: str
    function: Callable[..., Any]

    @property
    def name(self) -> str:
        return f"{self.language} kernel, line {self.function.__code__.co_firstlineno}"


@dataclass(frozen=True)
class Choice:
    """What was measured for a class of sizes, in seconds."""

    types: str
    seconds: dict[str, float]

    @property
    def chosen(self) -> str:
        return min(self.seconds, key=self.seconds.__getitem__)

    def __str__(self) -> str:
        times = ", ".join(f"{name} {s * 1e6:.1f} us" for name, s in self.seconds.items())
        return f"{self.types}: {self.chosen} ({times})"


@dataclass
class Kernels:
    """The kernels by hand of one operator, and what was chosen so far."""

    written: list[Written] = field(default_factory=list)
    choices: dict[Hashable, Choice] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)  # warnings, each given once


def kernels_of(operator: Operator) -> Kernels:
    """Those of an operator, which may have none."""
    found: Kernels = vars(operator).setdefault("_kernels", Kernels())
    return found


def declare(operator: Operator, chip: str, language: str) -> Callable[..., Any]:
    """What `operator.kernel(chip, language=...)` decorates with."""
    where = chip_named(chip)
    if language in ELSEWHERE and language not in where.languages:
        raise ArgumentError(f"kernels in {language} come with {ELSEWHERE[language]}, and "
                            f"{chip!r} takes {' and '.join(where.languages) or 'none'}",
                            hint='write it with language="c++"')
    if language not in where.languages:
        raise ArgumentError(f"the chip {chip!r} takes no kernels in {language!r}",
                            hint=f"it takes {', '.join(where.languages) or 'none'}")

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        kernels = kernels_of(operator)
        kernels.written.append(Written(operator, chip, language, function))
        kernels.choices.clear()
        operator.compiled.forget()
        return function

    return decorate


# ---------------------------------------------------------------- one kernel for some types
@dataclass(frozen=True, eq=False)
class Ready:
    """A kernel for tensors of certain types, compiled."""

    chip: Chip
    run: Run
    inputs: tuple[Any, ...]  # of each tensor: the number of the leaf, an array, or None
    results: tuple[tuple[DType, tuple[int, ...]], ...]

    def into(self, leaves: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Run on leaves of a call, into memory that is there."""
        memory = self.chip.memory
        held = [row_major(memory.brought(leaves[i])) if isinstance(i, int) else i
                for i in self.inputs]
        targets = [memory.brought(output) for output in outputs]
        self.run([*held, *targets])
        for target, output in zip(targets, outputs, strict=True):
            if target is not output:  # of the host's
                output[...] = to_numpy(memory.to_host(target))

    def entry(self, structure: Any) -> Callable[[Sequence[Any]], Any]:
        """What calls run."""
        def run(leaves: Sequence[Any]) -> Any:
            like = next((a for a in leaves if hasattr(a, "data_ptr")), None)
            outputs = [empty(shape, dtype, like) for dtype, shape in self.results]
            self.into(leaves, outputs)
            return pack(structure, outputs)

        return run


def ready(written: Written, rebuild: Rebuild, leaves: Sequence[Any],
          results: Sequence[tuple[DType, tuple[int, ...]]]) -> Ready | None:
    """The kernel for arguments like these; None where it is not for them, or cannot be built."""
    operator, chip = written.operator, chip_named(written.chip).under(knobs.now)
    numbered = [_Leaf(i, type_of(a)) for i, a in enumerate(leaves)]
    tensors, attrs = Rebuild(lambda *a, **k: operator.bind(a, k), rebuild.structure).call(numbered)
    joint = [leaf.type.dtype for leaf in tensors if isinstance(leaf, _Leaf)]
    held = [t if t is None or isinstance(t, _Leaf) else _number(t, joint) for t in tensors]
    types = [None if t is None else t.type if isinstance(t, _Leaf) else type_of(t) for t in held]
    answer = written.function(*types, **attrs)
    if answer is None:
        return None
    launch = answer if isinstance(answer, Launch) else Launch(answer)
    shapes = [*(() if t is None else t.shape for t in types), *(shape for _, shape in results)]
    if written.language in _MARK:
        if not isinstance(launch.source, str):
            raise ArgumentError(f"the kernel of {operator.name} answered with a "
                                f"{type(launch.source).__name__}",
                                hint="answer with source text, or None")
        launch = replace(launch, source=_source(written, launch.source,
                                                [len(s) for s in shapes], len(types)))
    sizes = tuple(int(n) for shape in shapes for n in shape)  # type: ignore[arg-type]
    kernel = Kernel(launch, _ENTRY, sizes, len(shapes), math.prod(results[0][1]))
    try:
        run = chip.build(written.language, kernel)
    except MissingDependency as error:
        told = kernels_of(operator).told
        if error.message not in told:
            told.add(error.message)
            warnings.warn(f"{error.message}: the generated kernel of {operator.name} is used",
                          stacklevel=2)
        return None
    inputs = (t.index if isinstance(t, _Leaf) else None if t is None else chip.memory.brought(t)
              for t in held)
    return Ready(chip, run, tuple(inputs), tuple(results))


@dataclass(frozen=True)
class _Leaf:
    """Stands for an argument while a call is sorted into tensors and attributes."""

    index: int
    type: TensorType


def _number(number: Any, joint: Sequence[DType]) -> np.ndarray:
    """A default as the body of the operator sees it."""
    kind = result_type(number, *joint)
    return np.asarray(number, (kind.compute if kind.is_float else kind).np)


def _source(written: Written, text: str, ranks: Sequence[int], inputs: int) -> str:
    """The user's text with what it may use, and the function that is called from here."""
    starts = [sum(ranks[:i]) for i in range(len(ranks))]
    listed = [f"{{p{i}, {rank}, shapes + {start}}}"
              for i, (rank, start) in enumerate(zip(ranks, starts, strict=True))]
    parameters = "".join(f", void* p{i}" for i in range(len(ranks)))
    line, file = _place(written.function, text)
    prelude = _INTEGERS[written.language] + PRELUDE
    return (f"{prelude}#line {line} \"{file}\"\n{text}\n#line 1 \"terrazzo\"\n"
            f'extern "C" {_MARK[written.language]}void {_ENTRY}(const int64_t* shapes'
            f"{parameters}) {{\n"
            f"    const Tensor in[] = {{{', '.join(listed[:inputs] or ['{}'])}}};\n"
            f"    Tensor out[] = {{{', '.join(listed[inputs:])}}};\n"
            "    kernel(in, out);\n}\n")


def _place(function: Callable[..., Any], text: str) -> tuple[int, str]:
    """The line and file that a source text begins at, if it is written there as it is."""
    code = inspect.unwrap(function).__code__
    lines = "".join(linecache.getlines(code.co_filename))
    at = lines.find(text)
    name = code.co_filename.replace("\\", "/")
    if at < 0:  # put together while running: lines count from its beginning
        return 1, f"kernel at {name}:{code.co_firstlineno}"
    return lines.count("\n", 0, at) + 1, name


# ---------------------------------------------------------------- the choice
def chosen(operator: Operator, rebuild: Rebuild, executable: Any, structure: Any,
           leaves: Sequence[Any], generated: Callable[[Sequence[Any]], Any]
           ) -> Callable[[Sequence[Any]], Any]:
    """The quickest entry for arguments like these, by the clock."""
    kernels = kernels_of(operator)
    if not kernels.written or not isinstance(executable, Executable):  # the host takes part
        return generated
    chip = executable.chip
    if not all(chip.memory.holds(a) or not a.shape for a in leaves):  # it brings them itself
        return generated
    results = executable.output_shapes(executable.bind(leaves))
    entries = {"generated": generated}
    for written in kernels.written:
        found = ready(written, rebuild, leaves, results) if written.chip == chip.name else None
        if found is not None:
            entries[written.name] = found.entry(structure)
    if len(entries) == 1:
        return generated
    key = (rebuild.key(), tuple((as_dtype(a.dtype), tuple(int(n).bit_length() for n in a.shape))
                                for a in leaves), frozenset(entries))
    if key not in kernels.choices:
        types = ", ".join(str(type_of(a)) for a in leaves)
        kernels.choices[key] = Choice(types, _timed(chip, entries, leaves))
    return entries[kernels.choices[key].chosen]


def _timed(chip: Chip, entries: dict[str, Callable[[Sequence[Any]], Any]],
           leaves: Sequence[Any]) -> dict[str, float]:
    """The least seconds of each of several ways, in turns."""
    best: dict[str, float] = {}
    for round in range(ROUNDS + 1):
        for name, entry in entries.items():
            if best.get(name, 0.0) > MOST_SECONDS and round > 1:
                continue
            seconds = chip.seconds(partial(entry, leaves))
            if round:  # the first run brings code and data into the caches
                best[name] = min(best.get(name, seconds), seconds)
    return best


def shown(operator: Operator) -> str:
    """The level "kernels": what there is, and what was chosen for which sizes."""
    kernels = kernels_of(operator)
    lines = [f"{operator.name}: generated" + "".join(f"; {w.name}" for w in kernels.written)]
    return "\n".join([*lines, *(f"  {choice}" for choice in kernels.choices.values())])


__all__ = ["Choice", "Written", "chosen", "declare", "kernels_of", "ready", "shown"]
