"""An Executable: loaded code with its constants, ready to be called from any thread."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from terrazzo.chips.memory import HOST, Block
from terrazzo.chips.registry import chip_named
from terrazzo.dtypes import DType, as_dtype
from terrazzo.errors import (
    ArgumentError,
    ArtifactError,
    DTypeError,
    IndexFault,
    OutOfMemory,
    ShapeError,
)
from terrazzo.index import Index, IndexExpr, Var, compile_python, free_vars
from terrazzo.index.guards import Guard
from terrazzo.knobs import knobs, thread_count
from terrazzo.runtime import artifact as artifacts
from terrazzo.runtime import pages
from terrazzo.runtime.artifact import Artifact, Constant, index_from
from terrazzo.runtime.layout import address_of, row_major, strides_of

if TYPE_CHECKING:
    from terrazzo.runtime.profile import Profile

NO_ARENA = Block(np.empty(0, np.uint8), 0)


class Executable:
    """Compiled code of one graph. Call it with arrays or torch tensors; it is reentrant."""

    def __init__(self, artifact: Artifact):
        self.chip = chip_named(artifact.chip).under(knobs.now)
        self.chip.demand()
        arrays = tuple(c.array() for c in artifact.constants)
        self._constants = [self.chip.memory.copy_in(a) for a in arrays]
        # What constants were packed from is nothing that an executable should keep alive.
        self.artifact = replace(artifact, constants=tuple(map(Constant, arrays)))
        self.dims = _dims_of(artifact)
        self.code = self.chip.load(artifact.name, artifact.made,
                                   [block.address for block in self._constants])
        self.strides = artifact.strides or (None,) * len(artifact.inputs)
        self.input_types = [(n, as_dtype(t), s) for n, t, s in artifact.inputs]
        self.output_types = [(as_dtype(t), s) for t, s in artifact.outputs]
        self._sources = [_axis_of(d, artifact) for d in self.dims]
        self._arena_size = _size_function(artifact.arena, self.dims)
        self._output_shapes = [tuple(_size_function(n, self.dims) for n in s)
                               for _, s in self.output_types]
        # Of indices that data tells how far they may reach: one number at the beginning of the
        # arena says after a run whether they did.
        self.reaches: Sequence[Any] = self.artifact.notes.get("reaches", ())
        self._arenas: list[Block] = []  # those no call is using; list operations are atomic

    @property
    def name(self) -> str:
        return self.artifact.name

    @property
    def over(self) -> Sequence[int | None]:
        """The input that each output may be written over: asked for when compiling, and proven."""
        return self.artifact.over or (None,) * len(self.artifact.outputs)

    # ------------------------------------------------------------ calling
    def __call__(self, *arrays: Any, out: Any = None) -> Any:
        """Run on arrays of the compiled types; answers one array or a tuple.

        `out` may have arrays for the results, None where one is to be made.
        """
        results = self.run(arrays, into=self._targets(out))
        return results[0] if len(results) == 1 else tuple(results)

    def run(self, arrays: Sequence[Any], *, threads: int = 0, into: Sequence[Any] = (),
            profiles: list[Profile] | None = None) -> list[Any]:
        """Check, convert to contiguous memory where needed, allocate, run.

        `threads` is the knob's where it is 0; `into` may hold arrays to write outputs to, which
        may lie where an input does; `profiles` takes the times of all kernels.
        """
        inputs = self.checked(arrays)
        if any(target is not None for target in into):
            from terrazzo.runtime.targets import Way, addresses_of

            inputs = [self.chip.memory.brought(a) for a in inputs]
            way = Way(self, inputs, into, threads, profiles)
            return way(inputs, into, addresses_of(inputs), addresses_of(into))
        sizes = self.bind(inputs)
        memory = self.chip.memory
        if not all(map(memory.holds, inputs)) or (not inputs and memory is not HOST):
            return self._run_elsewhere(inputs, sizes, threads, profiles)
        torch_like = next((a for a in arrays if hasattr(a, "data_ptr")), None)
        outputs = self.allocate(sizes, torch_like)
        self.run_into([*map(address_of, inputs), *map(address_of, outputs)], sizes, threads,
                      profiles)
        return outputs

    def _run_elsewhere(self, inputs: Sequence[Any], sizes: Sequence[int], threads: int,
                       profiles: list[Profile] | None) -> list[Any]:
        """Run on copies in the chip's memory; results are where the inputs were, if all were."""
        from terrazzo.runtime.hosted import to_numpy

        memory = self.chip.memory
        brought = [memory.brought(a) for a in inputs]
        outputs = self.allocate(sizes)
        self.run_into([*map(address_of, brought), *map(address_of, outputs)], sizes, threads,
                      profiles)
        if any(memory.holds(a) for a in inputs):
            return outputs
        tensors = any(hasattr(a, "data_ptr") for a in inputs)
        back = map(memory.to_host, outputs)
        return [o if tensors else to_numpy(o) for o in back]

    def again(self, arrays: Sequence[Any], into: Sequence[Any], threads: int = 0
              ) -> Callable[[], None] | None:
        """What repeats a run that was made on such memory; None where it copies anything.

        The memory is the caller's to keep, and what is bound to it must stay as it is.
        """
        from terrazzo.runtime.targets import Way, addresses_of, claim

        memory = self.chip.memory
        if not all(memory.holds(a) and hasattr(a, "dtype") for a in (*arrays, *into)):
            return None
        way = Way(self, arrays, into, threads)
        places, pointers = addresses_of(arrays), addresses_of(into)
        if not way.all_direct(places, pointers):
            return None

        def run() -> None:
            claim(into, self.name)
            self.run_into([*places, *pointers], way.sizes, threads)

        return run

    def _targets(self, out: Any) -> Sequence[Any]:
        if out is None:
            return ()
        targets = out if isinstance(out, (list, tuple)) else (out,)
        if len(targets) != len(self.output_types):
            raise ArgumentError(f"{self.name} has {len(self.output_types)} results, and out= "
                                f"{len(targets)}", hint="pass None where one is to be made")
        return targets

    @cached_property
    def guards(self) -> list[Guard]:
        """What sizes must keep to, beside the shapes of inputs."""
        return _guards_of(self.artifact, self.dims)

    def bind(self, inputs: Sequence[Any]) -> list[int]:
        """The values of the symbolic sizes; every input must agree with them."""
        shown = {"shape": lambda a: a.shape, "strides": lambda a: strides_of(a) or ()}
        sizes = [int(shown[kind](inputs[i])[axis]) for kind, i, axis in self._sources]
        table = dict(zip(self.dims, sizes, strict=True))
        for (name, _, shape), array in zip(self.input_types, inputs, strict=True):
            for n, size in zip(shape, array.shape, strict=True):
                wanted = _known(n, table)
                if wanted != size:
                    raise ShapeError(
                        f"input {name!r} of {self.name} has shape {tuple(array.shape)}, expected "
                        f"({', '.join(map(str, shape))}) with "
                        f"{', '.join(f'{d} = {v}' for d, v in table.items()) or 'fixed sizes'}")
        for guard in self.guards:
            if not guard.holds({d.name: n for d, n in table.items()}):
                raise ShapeError(f"{self.name} is for sizes with {guard}, not for "
                                 f"{', '.join(f'{d} = {v}' for d, v in table.items())}")
        return sizes

    def checked(self, arrays: Sequence[Any]) -> list[Any]:
        """Arrays of the compiled types and layouts, or an error."""
        if len(arrays) != len(self.input_types):
            raise ArgumentError(f"{self.name} takes {len(self.input_types)} inputs, got "
                                f"{len(arrays)}")
        return [self._checked(a, i) for i, a in enumerate(arrays)]

    def _checked(self, array: Any, i: int) -> Any:
        name, dtype, shape = self.input_types[i]
        if not hasattr(array, "dtype"):
            try:
                array = np.asarray(array, dtype.np)
            except (TypeError, ValueError):
                raise ArgumentError(f"input {name!r} of {self.name} is a {type(array).__name__}",
                                    hint="pass an array or a tensor") from None
        given = as_dtype(array.dtype)
        if given is not dtype:
            raise DTypeError(f"input {name!r} of {self.name} is {given.name}, compiled for "
                             f"{dtype.name}", hint=f"convert it with .astype('{dtype.name}')")
        if len(array.shape) != len(shape):
            raise ShapeError(f"input {name!r} of {self.name} has {len(array.shape)} dimensions, "
                             f"expected {len(shape)}")
        expected, found = self.strides[i], strides_of(array)
        if expected is None:
            return row_major(array)
        if found is None or any(isinstance(n, int) and n != s for n, s in zip(expected, found)):
            raise ArgumentError(f"input {name!r} of {self.name} was compiled for strides "
                                f"{self.strides[i]}", hint="compile it with an input like this one")
        return array

    def allocate(self, sizes: Sequence[int], torch_like: Any = None) -> list[Any]:
        """Fresh outputs, as torch tensors when the inputs are."""
        if torch_like is None and self.chip.memory is not HOST:
            return [self.chip.memory.empty(shape, dtype.np)
                    for dtype, shape in self.output_shapes(sizes)]
        return [empty(shape, dtype, torch_like) for dtype, shape in self.output_shapes(sizes)]

    def output_shapes(self, sizes: Sequence[int]) -> list[tuple[DType, tuple[int, ...]]]:
        """The types and shapes of the outputs for some values of the symbolic sizes."""
        return [(dtype, tuple(n(*sizes) for n in shape)) for (dtype, _), shape in zip(
            self.output_types, self._output_shapes, strict=True)]

    def run_into(self, pointers: Sequence[int], sizes: Sequence[int] = (), threads: int = 0,
                 profiles: list[Profile] | None = None) -> None:
        """Run on raw addresses of inputs then outputs."""
        threads = threads or thread_count()
        slots = [*pointers, *sizes]
        arena = self.take_arena(self.arena_size(sizes))
        if profiles is not None:
            profiles.append(self._run_timed(slots, arena, sizes, threads))
        elif knobs.profile:
            from terrazzo.runtime.profile import record

            record(self._run_timed(slots, arena, sizes, threads))
        else:
            self.code.run(slots, arena.address, threads)
        word = self.word(arena) if self.reaches else 0
        self.give_arena(arena)
        self.check_memory()
        if word > 0:
            raise self.fault(word, sizes)

    @staticmethod
    def word(arena: Block) -> int:
        """What a run left of indices: more than 0 where one was out of bounds."""
        return ctypes.c_int64.from_address(arena.address).value

    def fault(self, word: int, sizes: Sequence[int] = ()) -> IndexFault:
        """The error that such a number stands for."""
        return fault_of(word, self.reaches, {d.name: n for d, n in zip(self.dims, sizes)})

    def check_memory(self) -> None:
        """Raise what a kernel could not say itself: that it found no memory."""
        if self.code.failed():
            raise OutOfMemory(f"a kernel of {self.name} found no memory for its work",
                              hint="use smaller inputs")

    def arena_size(self, sizes: Sequence[int] = ()) -> int:
        """Bytes for values between kernels, for some values of the symbolic sizes."""
        return self._arena_size(*sizes)

    def take_arena(self, size: int) -> Block:
        """An arena of at least so many bytes that no other call is using."""
        if size == 0:
            return NO_ARENA
        while self._arenas:
            try:
                arena = self._arenas.pop()
            except IndexError:  # another thread was faster
                break
            if arena.owner.size >= size:
                return arena
        try:
            return self.chip.memory.allocate(size)
        except MemoryError:
            raise OutOfMemory(f"{self.name} needs {size / 2**20:.0f} MiB for values between its "
                              "kernels", hint="use smaller inputs") from None

    def give_arena(self, arena: Block) -> None:
        """Leave an arena to the next call."""
        if arena is not NO_ARENA and self.chip.memory.keeps_blocks:
            self._arenas.append(arena)

    def _run_timed(self, slots: Sequence[int], arena: Block, sizes: Sequence[int], threads: int
                   ) -> Profile:
        from terrazzo.runtime.profile import KernelTime, Profile

        clock = np.zeros(len(self.artifact.kernels) + 1, np.int64)
        start = time.perf_counter_ns()
        self.code.run(slots, arena.address, threads, clock.ctypes.data)
        elapsed = time.perf_counter_ns() - start
        ticks = int(clock[-1] - clock[0])
        if self.code.models_time:
            elapsed = ticks
        scale = elapsed / max(ticks, 1)
        table = dict(zip(self.dims, sizes, strict=True))
        kernels = [KernelTime(row["name"], row["origin"], (clock[i] - clock[0]) * scale,
                              (clock[i + 1] - clock[i]) * scale, _known(row["flops"], table),
                              _known(row["bytes"], table))
                   for i, row in enumerate(self.artifact.kernels)]
        return Profile(self.name, start, elapsed, tuple(kernels))

    # ------------------------------------------------------------ keeping
    def save(self, path: str | PathLike[str]) -> None:
        """Write everything into one file that loads without a compiler."""
        artifacts.save(self.artifact, path)

    @staticmethod
    def load(path: str | PathLike[str]) -> Executable:
        """Read what `save` wrote; refused with a reason on a CPU that lacks features."""
        try:
            return Executable(artifacts.load(path))
        except OSError as error:
            raise ArtifactError(f"cannot read {path}: {error.strerror or error}") from None

    def __repr__(self) -> str:
        ins = ", ".join(f"{n}: {t.short}[{', '.join(map(str, s))}]" for n, t, s in
                        self.input_types)
        return f"<executable {self.name}({ins}), {len(self.artifact.kernels)} kernels>"


# ---------------------------------------------------------------- helpers
def fault_of(word: int, reaches: Sequence[Any], sizes: Mapping[str, int]) -> IndexFault:
    """The error for an index out of bounds, by what a model's notes say of it."""
    from terrazzo.graph.reach import fault

    return fault(word, [(index_from(low), index_from(size), where) for low, size, where in reaches],
                 sizes)


def empty(shape: tuple[int, ...], dtype: DType, torch_like: Any = None) -> Any:
    """Fresh memory as a numpy array or, next to a torch tensor, a torch tensor."""
    try:
        if torch_like is None:
            return np.empty(shape, dtype.np)
        import torch

        made = torch.empty(shape, dtype=getattr(torch, dtype.name), device=torch_like.device)
        if made.is_cpu and made.nbytes >= pages.FRESH:
            pages.ask_for_large_pages(made.data_ptr(), made.nbytes)
        return made
    except (MemoryError, RuntimeError, ValueError) as error:
        words = ("memory", "too big", "overflow", "too large")
        if not isinstance(error, MemoryError) and not any(w in str(error) for w in words):
            raise
        size = int(np.prod(shape, dtype=np.float64)) * dtype.itemsize
        raise OutOfMemory(f"an output of shape {shape} needs {size / 2**20:.0f} MiB",
                          hint="use smaller inputs") from None


def _dims_of(artifact: Artifact) -> list[Var]:
    shapes = [shape for _, _, shape in artifact.inputs]
    found = {v for sizes in (*shapes, *artifact.strides) for n in sizes or ()
             for v in free_vars(n)}
    return sorted(found, key=lambda v: v.name)


def _guards_of(artifact: Artifact, dims: Sequence[Var]) -> list[Guard]:
    """What a model's notes say of sizes that its code has."""
    known = {d.name for d in dims}
    found = [Guard(relation, index_from(a), index_from(b))
             for relation, a, b in artifact.notes.get("guards", ())]
    return [g for g in found
            if {v.name for n in (g.left, g.right) for v in free_vars(n)} <= known]


def _axis_of(dim: Var, artifact: Artifact) -> tuple[str, int, int]:
    """Where the value of a symbolic size shows: in the shape or strides of an input, which axis."""
    shapes = [shape for _, _, shape in artifact.inputs]
    for kind, rows in (("shape", shapes), ("strides", artifact.strides)):
        for i, sizes in enumerate(rows):
            for axis, n in enumerate(sizes or ()):
                if isinstance(n, Var) and n.name == dim.name:
                    return kind, i, axis
    raise ArgumentError(f"the size {dim} is not a dimension of any input",
                        hint="every symbolic size must be one whole dimension of some input")


def _size_function(size: Index, dims: Sequence[Var]) -> Callable[..., int]:
    if not isinstance(size, IndexExpr):
        return lambda *_: size
    names = {d.name: f"d{i}" for i, d in enumerate(dims)}
    text = compile_python(size, names)
    params = ", ".join(names.values())
    return eval(f"lambda {params}: {text}", {"min": min, "max": max, "__builtins__": {}})


def _known(size: Index, table: dict[Var, int]) -> int:
    if not isinstance(size, IndexExpr):
        return int(size)
    from terrazzo.index import evaluate

    return int(evaluate(size, {v.name: n for v, n in table.items()}))
