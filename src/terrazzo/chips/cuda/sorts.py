"""Sorting on a GPU: which kernels there are for it, by rules with reasons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from terrazzo.base.shapes import normalize_axis, num_elements
from terrazzo.chips.cuda.parts import Parts
from terrazzo.chips.spec import ChipSpec
from terrazzo.codegen.triton.module import Written
from terrazzo.codegen.triton.sort import Cut, Runs, Sort, block_kernel, merge_kernel
from terrazzo.errors import UnsupportedOperator
from terrazzo.expr.ir import Program, Tensor

# Records that a program sorts: of one integer, and of two. A network of twice as many takes twice
# the time to compile, 5 s for two integers.
MOST_PLACES, MOST_PAIRS = 2048, 1024
TOGETHER = 512  # records of short lines that share a program


def kernels(program: Program, spec: ChipSpec) -> Parts:
    """The programs of a sort, or of the first elements in order, one after the other."""
    node = program.attrs["node"]
    (x,), (values, origins) = program.inputs, program.outputs
    axis = normalize_axis(node.attrs["axis"], len(x.shape))
    if not isinstance(x.shape[axis], int) or not isinstance(values.shape[axis], int):
        raise UnsupportedOperator("how often runs are merged is decided by the length of the axis, "
                                  "which is not known")
    down = node.attrs.get("descending", node.attrs.get("largest"))
    sort = Sort(_flat(x, axis), _flat(values, axis), _flat(origins, axis), down)
    if sort.length >= 1 << 31:
        raise UnsupportedOperator("where an element comes from has 31 bits")
    made = _Programs(program, sort, spec)
    most = MOST_PLACES if sort.packs else MOST_PAIRS
    if sort.length <= most:
        made.sort_blocks(cut_of(sort, sort.length), None, None)
    elif 2 * sort.kept <= most:
        made.select(most)
    else:
        made.merge(most)
    return made.parts


def _flat(tensor: Tensor, axis: int) -> Tensor:
    """The same memory by what comes before an axis, the axis, and what comes after it."""
    shape = tensor.shape
    return Tensor(tensor.name, (num_elements(shape[:axis]), shape[axis],
                                num_elements(shape[axis + 1:])), tensor.dtype)


def cut_of(sort: Sort, length: int) -> Cut:
    """How lines that fit are sorted: short ones side by side."""
    places = 1 << max(length - 1, 0).bit_length()
    lines = sort.lines
    most = 1 << (lines - 1).bit_length() if isinstance(lines, int) else TOGETHER
    return Cut(places, max(1, min(TOGETHER // places, most)))


@dataclass(frozen=True, eq=False)
class _Programs:
    """The programs of one sort, as they are added."""

    whole: Program
    sort: Sort
    spec: ChipSpec
    parts: Parts = field(default_factory=list)

    def select(self, most: int) -> None:
        """Runs of the first elements of blocks, of which again, until one block holds them all."""
        kept, given, length = self.sort.kept, None, self.sort.length
        while length > most:
            pieces = -(-length // most)
            made = Runs.of(self.sort, f"best{len(self.parts)}", pieces * kept, kept)
            self.sort_blocks(Cut(most, 1), given, made)
            given, length = made, pieces * kept
        self.sort_blocks(cut_of(self.sort, length), given, None)

    def merge(self, most: int) -> None:
        """Sorted blocks that are merged by pairs."""
        sort = self.sort
        given, spare = (Runs.of(sort, name, sort.length, most) for name in ("runs", "merged"))
        self.sort_blocks(Cut(most, 1), None, given)
        while 2 * given.run < sort.length:
            made = Runs(spare.tensors, 2 * given.run)
            self.add("_merge", merge_kernel, given.tensors, made.tensors, given, made)
            given, spare = made, given
        results = (sort.values, sort.origins)
        self.add("", merge_kernel, (sort.source, *given.tensors), results, given, None)

    def sort_blocks(self, cut: Cut, given: Runs | None, made: Runs | None) -> None:
        sort = self.sort
        records = given.tensors if given else ()
        source = (sort.source,) if given is None or made is None else ()
        outputs = made.tensors if made else (sort.values, sort.origins)
        self.add("_blocks" if made else "", block_kernel, (*source, *records), outputs, cut, given,
                 made)

    def add(self, kind: str, kernel: Callable[..., Written], inputs: tuple[Tensor, ...],
            outputs: tuple[Tensor, ...], *options: object) -> None:
        """A program, and its kernel, to which tensors have three axes."""
        number = len(self.parts)
        name = f"{self.whole.name}{kind}{number if kind and number else ''}"
        known = {self.sort.source: self.whole.inputs[0], self.sort.values: self.whole.outputs[0],
                 self.sort.origins: self.whole.outputs[1]}
        printed = self.program(name, inputs, outputs)
        given, made = (tuple(known.get(t, t) for t in some) for some in (inputs, outputs))
        self.parts.append((self.program(name, given, made),
                           partial(kernel, printed, self.sort, *options, self.spec)))

    def program(self, name: str, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]
                ) -> Program:
        return Program(name, inputs, outputs, outputs, self.whole.kind, self.whole.attrs)
