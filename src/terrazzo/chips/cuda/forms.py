"""What a program becomes on a GPU: kernels of Triton, or a part that the CPU runs, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from terrazzo.base.shapes import num_elements
from terrazzo.chips.cuda import attention, products
from terrazzo.chips.cuda.split import split
from terrazzo.chips.spec import ChipSpec
from terrazzo.codegen.triton.module import UpTo, Written, module_text, warps_for
from terrazzo.codegen.triton.source import triton_kernel
from terrazzo.errors import TerrazzoError
from terrazzo.expr.ir import Program, Tensor
from terrazzo.expr.matmul import match_product
from terrazzo.index import Index, bounds

# Operators that the CPU runs on copies, and why; those of linear algebra are the host's anywhere.
ON_CPU = {
    **dict.fromkeys(("cumulative", "linear_recurrence", "linear_attention_steps",
                     "recurrent_steps"), "each step needs the one before it"),
    **dict.fromkeys(("scatter", "scatter_at", "counts_of_ngrams"),
                    "several results go to one place, in an order"),
    **dict.fromkeys(("sort_pairs", "top_pairs", "rank_rows", "select_boxes"),
                    "it compares in an order that data decides"),
    **dict.fromkeys(("fft_columns", "fft_lines", "real_halves", "real_rows"),
                    "its butterflies are loops for CPUs"),
    **dict.fromkeys(("det", "pairwise_coupling", "tree_ensemble"),
                    "its loops are written for CPUs"),
}
FITS = (256, 1024, 4096, 16384)  # positions of rows of unknown length that are one block


@dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel of a program: itself, the tensors it is given, and how sizes vary it."""

    program: Program
    versions: tuple[Version, ...]
    extents: tuple[Index, ...] = ()  # the sizes that `most` of a version is about

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.program.inputs, *self.program.outputs)

    @property
    def written(self) -> Written:
        """The version that serves any sizes."""
        return self.versions[-1].written


@dataclass(frozen=True, eq=False)
class Version:
    """A kernel for some sizes: the first version whose conditions hold is launched."""

    written: Written
    sixteen: bool = False  # all sizes are multiples of 16, so that rows begin at 16 bytes
    most: int = 0  # of the extent of its blocks; 0: any

    def constants(self) -> dict[str, int]:
        """What is fixed when it is compiled."""
        return {name: (min(n.most, self.most) if self.most else n.most)
                if isinstance(n, UpTo) else n for name, n in self.written.constants.items()}

    @property
    def warps(self) -> int:
        written = self.written
        if not self.most or not written.varies:
            return written.warps
        bits = max(t.dtype.bits for t in written.pointers)
        return warps_for(self.most, bits, written.rules)


@dataclass(frozen=True, eq=False)
class Form:
    """The kernels of a program in order; none where the CPU runs it, for a reason."""

    kernels: tuple[Kernel, ...] = ()
    reason: str = ""

    def text(self, program: Program) -> str:
        """Triton source, a module for each kernel."""
        if not self.kernels:
            return f"# {program.name} runs on the CPU: {self.reason}\n"
        return "\n\n".join(module_text(k.program, k.written) for k in self.kernels)


def form_of(program: Program, spec: ChipSpec) -> Form:
    """How a program runs on a GPU."""
    if program.kind == "opaque":
        return Form(reason=ON_CPU.get(program.attrs["node"].op.name,
                                      "its loops are written for CPUs"))
    try:
        if program.kind == "attention":
            return Form(tuple(Kernel(part, tuple(map(Version, made)))
                              for part, made in attention.kernels(program, spec)))
        return Form(tuple(_kernel(part, spec) for part in parts_of(program, spec)))
    except TerrazzoError as error:
        return Form(reason=str(error).split("\n")[0])


def parts_of(program: Program, spec: ChipSpec) -> Sequence[Program]:
    """A program as programs of one kernel each; what one makes for the next is its output."""
    if program.kind == "contraction":
        product = products.whole(program)
        if product is not None:
            return products.split_sums(product, spec)
        program = _each_by_itself(program)
    if program.kind == "rows":
        return split(program, spec) or [program]
    return [program]


def _each_by_itself(program: Program) -> Program:
    """A contraction as sums along rows: several side by side, unless there is one row of them."""
    rank = max(len(s.axes) for s in program.stages)
    product = match_product(program)
    attrs = {"rows": rank, "tiles": product is None or product.row is not None}
    return replace(program, kind="rows", attrs=attrs)


def _kernel(program: Program, spec: ChipSpec) -> Kernel:
    if program.kind == "contraction":
        found = products.versions(program, spec)
        rows = products.rows_of(program)
        return Kernel(program, tuple(Version(w, most=most) for w, most in found), (rows,))
    first = triton_kernel(program, spec)
    if not first.dims:
        return Kernel(program, (Version(first),))
    narrow = triton_kernel(program, spec, wide=False)
    fitting: list[Version] = []
    if narrow.varies:
        fits = triton_kernel(program, spec, wide=False, fits=True)
        # Rows that do not begin at 16 bytes take the loops, if they are not short.
        fitting = [Version(fits, sixteen=most != FITS[0], most=most) for most in FITS]
    return Kernel(program, (*fitting, Version(narrow, sixteen=True), Version(narrow), Version(
        triton_kernel(program, spec, wide=True))))


def elements(program: Program) -> list[Index]:
    """The numbers of elements that addresses of 32 bits must reach."""
    sizes = [num_elements(t.shape) for t in (*program.inputs, *program.stages)]
    return [n for n in dict.fromkeys(sizes) if not (top := bounds(n)[1]) or top >= 1 << 31]
