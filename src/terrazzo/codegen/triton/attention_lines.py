"""What kernels of attention and of its gradient share: operands, tiles, and lines about scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from terrazzo.base.shapes import contiguous_strides, num_elements
from terrazzo.chips.spec import ChipSpec
from terrazzo.codegen.triton.dot_factors import DESCRIPTOR_BYTES, HALVES
from terrazzo.codegen.triton.emit import unflatten
from terrazzo.codegen.triton.kernel_lines import KernelLines
from terrazzo.codegen.triton.lines import Block
from terrazzo.codegen.triton.module import Written
from terrazzo.codegen.triton.spelling import ATOM, type_text
from terrazzo.dtypes import DType, float32
from terrazzo.expr.ir import Program, Tensor
from terrazzo.index import Index, Var, bounds, divisible, minimum, proves_eq

LOG2_E = math.log2(math.e)
# What lines call their own, so that no tensor does.
OWN_NAMES = ("program", "part", "block", "member", "first", "last", "whole", "middle", "scores",
             "weights", "largest", "larger", "total", "sums", "correction", "q", "g", "k", "v",
             "delta", "slopes", "by_q", "by_k", "by_v", "logarithms")


@dataclass(frozen=True)
class Tiles:
    """How the work is cut, and how the loop over keys is run."""

    rows: int  # of a tile of queries
    keys: int  # at a time
    warps: int = 4
    stages: int = 3
    descriptors: bool = False  # keys and values come by the engine that copies tiles (TMA)
    parts: int = 1  # of the keys
    packed: bool = False  # heads that share keys are rows of one tile
    precision: str = "tf32x3"  # of float32
    groups: int = 0  # of four warps in Gluon, each of which has so many rows; 0: plain Triton
    persistent: bool = True  # whether a program of Gluon goes from tile to tile


@dataclass(frozen=True, eq=False)
class Attention:
    """The operands, sizes and options of one attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    out: Tensor
    sums: Tensor | None  # log-sum-exp of the scores of each query, for the gradient
    batch: tuple[Index, ...]
    heads: Index
    shared: Index  # heads of q for each of k and v
    queries: Index
    keys: Index  # those that some query sees
    size: int  # of a query and a key
    value_size: int
    causal: bool
    nan_if_unseen: bool
    scale: float

    @staticmethod
    def of(program: Program) -> Attention:
        q, k, v, *rest = program.inputs
        out, *sums = program.outputs
        attrs = program.attrs["node"].attrs
        *batch, heads, queries, value_size = (1, *out.shape)[-max(len(out.shape), 3):]
        keys, size = k.shape[-2:]
        assert isinstance(size, int) and isinstance(value_size, int)
        kv_heads = k.shape[-3] if len(k.shape) > 2 else 1
        alone = kv_heads == 1 or proves_eq(heads, kv_heads)
        causal = bool(attrs["causal"])
        if causal:  # places are counted from the first, so no query sees keys past their number
            keys = minimum(keys, q.shape[-2])
            causal = q.shape[-2] != 1
        return Attention(q, k, v, rest[0] if rest else None, out, sums[0] if sums else None,
                         tuple(batch), heads, 1 if alone else heads // kv_heads, queries, keys,
                         size, value_size, causal, attrs.get("unseen") == "nan",
                         scale_of(attrs["scale"], size))

    @property
    def dtype(self) -> DType:
        """The type in which factors are multiplied."""
        types = {t.dtype for t in (self.q, self.k, self.v)}
        return types.pop() if len(types) == 1 and types <= set(HALVES) else float32


def scale_of(given: float | None, size: int) -> float:
    """What scores are multiplied by."""
    return float(given) if given is not None else 1 / math.sqrt(size or 1)


def stride_of(tensor: Tensor, axis: int) -> Index:
    """The distance of neighbours along an axis counted from the back; 0 where it stretches."""
    if -axis > len(tensor.shape) or tensor.shape[axis] == 1:
        return 0
    return (tensor.strides or contiguous_strides(tensor.shape))[axis]


def place_in(tensor: Tensor, *places: Index) -> Index:
    """The address of an element, by as many indices as matter, the last axis last."""
    address = tensor.offset
    for axis, place in enumerate(reversed(places)):
        address = address + place * stride_of(tensor, -axis - 1)
    return address


def describable(tensor: Tensor, size: int) -> bool:
    """Whether a descriptor can read rows of keys or values."""
    bytes_ = tensor.dtype.itemsize
    strides = tensor.strides or contiguous_strides(tensor.shape)
    return tensor.dtype in HALVES and strides[-1] == 1 and strides[-2] != 0 and size >= 16 and all(
        divisible(n * bytes_, DESCRIPTOR_BYTES) for n in (*strides[:-1], tensor.offset))


def lanes_for(n: int) -> int:
    """The lanes of a vector of this size: what tensor cores multiply has 16 at least."""
    return max(16, 1 << max(n - 1, 0).bit_length())


class AttentionLines(KernelLines):
    """One kernel while it is written."""

    def __init__(self, program: Program, attention: Attention, chip: ChipSpec, tiles: Tiles,
                 wide: bool):
        super().__init__(program, chip, wide, OWN_NAMES)
        self.a, self.tiles, self.dtype = attention, tiles, attention.dtype

    def launched(self, programs: Index) -> Written:
        """The kernel as it is written now."""
        return self.as_written(programs, self.tiles.warps, self.tiles.stages,
                               self.tiles.descriptors)

    # ------------------------------------------------------------ lines
    def moving(self, name: str, start: str, extent: Index, size: str, exact: bool
               ) -> tuple[Var, Var]:
        """Index variables of a loop that begins at `start`: as rows, and as columns."""
        made = []
        for kind, direction in (("_down", "[:, None]"), ("", "[None, :]")):
            var = Var(f"%{name}{kind}_{start}", 0, bounds(extent)[1])
            lanes = f"{start} + tl.arange(0, {size}){direction}"
            self.emitter.blocks[var] = Block(
                var, self.names.fresh(name), extent,
                f"({lanes}).to(tl.int64)" if self.wide else lanes, size, exact)
            made.append(var)
        return made[0], made[1]

    def member_of(self, sizes: Sequence[Index], blocks: Index, latest_first: bool | None = None
                  ) -> list[Index]:
        """Which block this program has, and of which member: its places along axes of `sizes`.

        Where blocks take unlike times, `latest_first` says which are the longest: those come first.
        """
        emitter, count = self.emitter, num_elements(sizes)
        self.line(f"program = {self.instance}")
        if self.tiles.parts > 1:
            parts = self.constant("PARTS", self.tiles.parts)
            self.line(f"part = program % {parts}")
            self.line(f"program = program // {parts}")
        number, members = (emitter.index(n).inside(ATOM) for n in (blocks, count))
        if latest_first is None:
            self.line(f"block = program % {number}")
            self.line(f"member = program // {number}")
        else:
            turned = f"{number} - 1 - " if latest_first else ""
            self.line(f"block = {turned}program // {members}")
            self.line(f"member = program % {members}")
        self.member = self.number("member", count)
        return list(unflatten(self.member, list(sizes)))

    # ------------------------------------------------------------ memory and factors
    def as_factor(self, text: str, dtype: DType) -> str:
        return text if dtype is self.dtype else f"{text}.to({type_text(self.dtype)})"

    def narrowed(self, text: str) -> str:
        """What was computed in float32 as a factor."""
        return text if self.dtype is float32 else f"{text}.to({type_text(self.dtype)})"

    @property
    def precision(self) -> str:
        return f', input_precision="{self.tiles.precision}"' if self.dtype is float32 else ""

    def descriptor(self, tensor: Tensor, member: Sequence[Index], size: int, rows: str, lanes: str
                   ) -> str:
        """A descriptor of the rows of one head, some at a time."""
        index = self.emitter.index
        step = size if tensor.shape[-2] == 1 else stride_of(tensor, -2)
        name = self.names.fresh(f"{tensor.name}_rows")
        self.line(f"{name} = tl.make_tensor_descriptor({self.pointers[tensor]} + "
                  f"{index(place_in(tensor, *member, 0, 0)).text}, "
                  f"[{index(tensor.shape[-2]).text}, {size}], [{index(step).text}, 1], "
                  f"[{rows}, {lanes}])")
        return name

    def described(self, reader: str, start: str) -> str:
        """Rows from `start` on, by a descriptor."""
        at = f"({start}).to(tl.int32)" if self.wide else start
        return f"{reader}.load([{at}, 0])"

    # ------------------------------------------------------------ scores
    def masked_scores(self, batch: Sequence[Index], head: Index, query: Index, key: Var,
                      checked: bool) -> str:
        """Leave out the scores of keys that are not seen; what the rest is to be multiplied by."""
        a, emitter = self.a, self.emitter
        # The scale is part of what follows, one multiplication and addition, if it may be.
        scaled = f" * {a.scale * LOG2_E!r}"
        if a.scale <= 0 or (a.mask is not None and not a.mask.dtype.is_bool):
            self.line(f"scores = scores{scaled}")
            scaled = ""
        conditions = []
        if checked:
            end = emitter.mask(frozenset({key}))
            conditions += [] if end is None else [end.text]
            if a.causal:
                place, seen = emitter.index(query), emitter.index(key)
                conditions.append(f"({place.text} >= {seen.text})")
        if a.mask is not None:
            mask = self.load(a.mask, place_in(a.mask, *batch, head, query, key))
            if a.mask.dtype.is_bool:
                conditions.append(f"({mask} != 0)")
            else:
                self.line(f"scores += {mask}.to(tl.float32) * {LOG2_E!r}")
        if conditions:
            self.line(f"scores = tl.where({' & '.join(conditions)}, scores, float('-inf'))")
        return scaled
