"""What a program becomes on a GPU: kernels of Triton, or a part that the CPU runs, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from terrazzo.base.shapes import num_elements
from terrazzo.chips.cuda import attention, choices, products, scans, scatters, sorts
from terrazzo.chips.cuda.layouts import with_channels_last, with_packed_weights
from terrazzo.chips.cuda.parts import Maker, Parts
from terrazzo.chips.cuda.split import split
from terrazzo.chips.cuda.windows import even_windows
from terrazzo.chips.spec import ChipSpec
from terrazzo.codegen.triton.attention_lines import Attention
from terrazzo.codegen.triton.module import UpTo, Written, module_text, warps_for
from terrazzo.codegen.triton.source import triton_kernel
from terrazzo.errors import TerrazzoError
from terrazzo.expr.ir import Program, Tensor
from terrazzo.expr.matmul import match_product
from terrazzo.index import Index, bounds
from terrazzo.runtime.tuned import Choice

# Operators that the CPU runs on copies, and why; those of linear algebra are the host's anywhere.
ON_CPU = {
    **dict.fromkeys(("linear_attention_steps", "recurrent_steps"),
                    "each step needs the one before it"),
    "counts_of_ngrams": "several results go to one place, in an order",
    **dict.fromkeys(("rank_rows", "select_boxes"), "it compares in an order that data decides"),
    **dict.fromkeys(("fft_columns", "fft_lines", "real_halves", "real_rows"),
                    "its butterflies are loops for CPUs"),
    **dict.fromkeys(("det", "pairwise_coupling", "tree_ensemble"),
                    "its loops are written for CPUs"),
}
# Operators whose kernels are written for them.
WHOLE: dict[str, Callable[[Program, ChipSpec], Parts]] = {
    **dict.fromkeys(("cumulative", "linear_recurrence"), scans.kernels),
    **dict.fromkeys(("scatter", "scatter_at"), scatters.kernels),
    **dict.fromkeys(("sort_pairs", "top_pairs"), sorts.kernels),
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

    @property
    def shown(self) -> Version:
        """The version to be looked at: what a GPU runs that has a language of its own."""
        return self.versions[0 if self.versions[0].written.gluon else -1]


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
    results: tuple[Tensor, ...] = ()  # where not those of the last kernel
    key: str = ""  # of a program for which something may be chosen
    choice: Choice | None = None  # what was; None: as rules say
    remark: str = ""  # what was chosen, and why, in words

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """What kernels write of what the program does."""
        return self.results or self.kernels[-1].program.outputs

    def text(self, program: Program) -> str:
        """Triton source, a module for each kernel."""
        if not self.kernels:
            return f"# {program.name} runs on the CPU: {self.reason}\n"
        text = "\n\n".join(module_text(k.program, k.shown.written) for k in self.kernels)
        return f"# {self.remark}\n{text}" if self.remark else text


def form_of(program: Program, spec: ChipSpec, choice: Choice | None = None) -> Form:
    """How a program runs on a GPU: as was chosen, or by rule."""
    if program.kind == "opaque" and program.attrs["node"].op.name not in WHOLE:
        return Form(reason=ON_CPU.get(program.attrs["node"].op.name,
                                      "its loops are written for CPUs"))
    try:
        if program.kind == "opaque":
            made = WHOLE[program.attrs["node"].op.name](program, spec)
            return Form(tuple(_kernel(p, spec) if make is None else _written_whole(p, make)
                              for p, make in made))
        if program.kind == "attention":
            cut = choices.tiles(choice, Attention.of(program)) if choice else None
            return Form(tuple(Kernel(part, tuple(map(Version, made)))
                              for part, made in attention.kernels(program, spec, cut)),
                        results=program.outputs)
        parts = parts_of(program, spec, choice)
        main = _main(parts)
        return Form(tuple(_kernel(p, spec, choice if p is main else None) for p in parts))
    except TerrazzoError as error:
        return Form(reason=str(error).split("\n")[0])


def space_of(program: Program, spec: ChipSpec, form: Form) -> choices.Space | None:
    """What may be chosen for a program that has this form by rule."""
    if not form.kernels or program.kind not in ("pointwise", "rows", "contraction", "attention"):
        return None
    if program.kind == "attention" and program.attrs["node"].op.name == "attention_gradients":
        return None  # which has two kernels, by rule
    parts = [k.program for k in form.kernels]
    main = _main(parts)
    if main.kind == "contraction":
        return choices.of_product(_in_order(program)[-1], main, spec)
    if len(parts) > 1 and program.kind != "attention":
        return None  # parts of rows, each of which goes by rule
    return choices.space_of(program, main, form.kernels[0].written, spec)


def _main(parts: Sequence[Program]) -> Program:
    """The part that choices are about: the sums of a product, which others may stand around."""
    return next((p for p in parts if p.kind == "contraction"), parts[0])


def _in_order(program: Program) -> list[Program]:
    """A product, behind the programs that bring its operands into order if there are any."""
    made = [program]
    for into_order in (with_channels_last, with_packed_weights):
        made = [*made[:-1], *into_order(made[-1])]
    product = products.whole(made[-1])
    assert product is not None
    return [*made[:-1], product]


def parts_of(program: Program, spec: ChipSpec, choice: Choice | None = None
             ) -> Sequence[Program]:
    """A program as programs of one kernel each; what one makes for the next is its output."""
    if program.kind == "contraction":
        if products.whole(program) is not None:
            *first, product = _in_order(program)
            return [*first, *products.split_sums(product, spec, choice["parts"] if choice else 0)]
        program = _each_by_itself(program)
    if program.kind == "rows":
        program = even_windows(program)
        return split(program, spec) or [program]
    return [program]


def _each_by_itself(program: Program) -> Program:
    """A contraction as sums along rows: several side by side, unless there is one row of them."""
    rank = max(len(s.axes) for s in program.stages)
    product = match_product(program)
    attrs = {"rows": rank, "tiles": product is None or product.row is not None}
    return replace(program, kind="rows", attrs=attrs)


def _kernel(program: Program, spec: ChipSpec, choice: Choice | None = None) -> Kernel:
    if program.kind == "contraction":
        found = products.versions(program, spec, choices.tiling(choice))
        rows = products.rows_of(program)
        return Kernel(program, tuple(Version(w, most=most) for w, most in found), (rows,))
    first = triton_kernel(program, spec, blocks=choices.blocks(choice))
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


def _written_whole(program: Program, make: Maker) -> Kernel:
    """The kernel of an operator, for the sizes it may have."""
    large = bool(elements(program))
    if not program.dims:
        return Kernel(program, (Version(make(large)),))
    narrow = make(False)
    wide = (Version(make(True)),) if large else ()
    return Kernel(program, (Version(narrow, sixteen=True), Version(narrow), *wide))


def elements(program: Program) -> list[Index]:
    """The numbers of elements that addresses of 32 bits must reach."""
    sizes = [num_elements(t.shape) for t in (*program.inputs, *program.stages)]
    return [n for n in dict.fromkeys(sizes) if not (top := bounds(n)[1]) or top >= 1 << 31]
