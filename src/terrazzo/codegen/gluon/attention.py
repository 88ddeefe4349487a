"""Prints attention for Hopper in Gluon: scores of the next keys while these are weighed.

Groups of four warps have roles (FlashAttention-3). One copies tiles of keys and values into a ring
of shared memory, the others attend, each for queries of its own: the products of the next scores
and of the last weights are under way while a group computes the weights between them, and what one
group computes hides behind the products of the other. A program goes from tile to tile of queries,
so that the copies of the next tile begin before this one is stored.

Keys are passed over from the last to the first, so that only what comes first needs a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from terrazzo.base.shapes import num_elements
from terrazzo.chips.spec import ChipSpec
from terrazzo.codegen.triton.attention_lines import LOG2_E, Attention, Tiles, describable, stride_of
from terrazzo.codegen.triton.dot_factors import HALVES
from terrazzo.codegen.triton.lines import Names
from terrazzo.codegen.triton.module import RESERVED, Written
from terrazzo.expr.ir import Program, Tensor
from terrazzo.index import Index

SPARE_BYTES = 1 << 10  # of shared memory for barriers, and for warps to be told their role
SIZES = (64, 128)  # of queries, keys and values that rows of shared memory are made for
# Registers of a thread: as compiled, of a group that attends, of the one that copies.
_REGISTERS = {1: (128, 216, 24), 2: (168, 240, 24), 3: (128, 160, 24)}
_OWN_NAMES = ("gl", "gluon", "mbarrier", "tma", "copy_tile", "put", "place_of", "copies", "attends",
              "weighed", "fence_async_shared", "warpgroup_mma", "warpgroup_mma_wait")
_MOST_PLANNED = 1 << 15  # tiles whose order is looked at: of more any is good


@dataclass(frozen=True)
class _Axes:
    """A tensor as batch, heads and rows: sizes, and strides, which are 0 where it stretches."""

    sizes: tuple[int, int, int]
    strides: tuple[int, int, int]

    @staticmethod
    def of(tensor: Tensor, batch: Sequence[int]) -> _Axes | None:
        """None where axes of the batch do not lie as one would."""
        rank = len(tensor.shape)
        sizes = [_known(n) for n in (*[1] * (len(batch) + 3 - rank), *tensor.shape)]
        steps = [_known(stride_of(tensor, axis)) for axis in range(-len(sizes), 0)]
        if sizes[-1] > 1 and steps[-1] != 1:
            return None
        outer = [(n, s, b) for n, s, b in zip(sizes[:-3], steps, batch) if b > 1]
        if any(n != b for n, _, b in outer) and any(n > 1 for n, _, _ in outer):
            return None
        if any(left[1] != right[1] * right[0] for left, right in pairwise(outer)):
            return None
        count = num_elements([n for n, _, _ in outer])
        assert isinstance(count, int)
        step = outer[-1][1] if outer else 0
        return _Axes((count, sizes[-3], sizes[-2]), (step, steps[-3], steps[-2]))


def _known(n: Index) -> int:
    """A size of a program whose sizes are known."""
    assert isinstance(n, int)
    return n


def has_kernel(attention: Attention, spec: ChipSpec) -> bool:
    """Whether this attention is one that the kernel is for."""
    a = attention
    tensors = (a.q, a.k, a.v, a.out)
    if not (spec.has("sm_90") and spec.has("tma") and spec.has("wgmma")) or a.mask is not None:
        return False
    if a.dtype not in HALVES or a.out.dtype is not a.dtype or a.scale <= 0:
        return False
    if a.size != a.value_size or a.size not in SIZES or not all(
            isinstance(n, int) for t in tensors for n in (*t.shape, *(t.strides or ()), t.offset)):
        return False
    axes = [_Axes.of(t, _batch(a)) for t in tensors]
    return all(describable(t, a.size) for t in (a.k, a.v)) and all(
        x is not None and x.sizes[2] * x.strides[2] < 1 << 31 for x in axes)


def shared_bytes(tiles: Tiles, size: int) -> int:
    """The shared memory of tiles of numbers of two bytes, barriers aside."""
    return (tiles.rows * tiles.groups + 2 * tiles.keys * tiles.stages) * size * 2


def attention_kernel(program: Program, attention: Attention, chip: ChipSpec, tiles: Tiles, *,
                     wide: bool) -> Written:
    """The kernel that attends; addresses are of 64 bits in any case."""
    return _Kernel(program, attention, chip, tiles).written(wide)


def _batch(a: Attention) -> list[int]:
    return [_known(n) for n in a.batch]


class _Kernel:
    """One kernel while it is written."""

    def __init__(self, program: Program, attention: Attention, chip: ChipSpec, tiles: Tiles):
        self.a, self.tiles, self.chip = attention, tiles, chip
        names = Names((*RESERVED, *_OWN_NAMES))
        self.name = names.fresh(program.name)
        self.pointers = {t: names.fresh(f"{t.name}_ptr")
                         for t in (*program.inputs, *program.outputs)}
        self.rows = tiles.rows * tiles.groups
        self.blocks = -(-_known(attention.queries) // self.rows)
        self.members = _known(num_elements([*attention.batch, attention.heads]))

    def written(self, wide: bool) -> Written:
        total = self.members * self.blocks
        programs = min(total, self.chip.cores) if self.tiles.persistent else total
        functions = (self.sizes(programs), _PLACE, self.copying(), *self.attending())
        return Written(self.name, tuple(self.lines()), self.pointers, {}, programs, {}, 4, wide,
                       self.chip.launch, descriptors=True, gluon=True, helpers=functions,
                       registers=_REGISTERS[self.tiles.groups][0])

    def axes(self, tensor: Tensor) -> _Axes:
        axes = _Axes.of(tensor, _batch(self.a))
        assert axes is not None
        return axes

    # ------------------------------------------------------------ texts
    def sizes(self, programs: int) -> str:
        """What does not change, as constants of the module."""
        a, tiles = self.a, self.tiles
        known = {
            "ROWS": (tiles.rows, "queries of a group of warps"),
            "GROUPS": (tiles.groups, "of warps that attend"),
            "KEYS": (tiles.keys, "of a tile"),
            "SIZE": (a.size, "of a query, a key and a value"),
            "STAGES": (tiles.stages, "tiles of keys, and of values, in shared memory"),
            "QUERIES": (a.queries, ""), "LENGTH": (a.keys, "keys that some query sees"),
            "HEADS": (a.heads, ""), "SHARED": (a.shared, "heads of q for each of k and v"),
            "MEMBERS": (self.members, "heads of all batches"),
            "BLOCKS": (self.blocks, "of queries of a member"),
            "SIDE": (self.side(programs), "members that take turns"),
            "PROGRAMS": (programs, ""), "CAUSAL": (a.causal, ""),
            "SCALE": (a.scale * LOG2_E, "so that weights are powers of two"),
            "LOWEST": (-1e38, "the largest of no scores")}
        lines = [f"{name} = gl.constexpr({value!r}){'  # ' if why else ''}{why}"
                 for name, (value, why) in known.items()]
        wide = a.size // 8
        return "\n".join([*lines, *(f"{name} = gl.constexpr(gl.{layout})" for name, layout in (
            ("SCORES", f"NVMMADistributedLayout([3, 0], [4, 1], [16, {tiles.keys}, 16])"),
            ("SUMS", f"NVMMADistributedLayout([3, 0], [4, 1], [16, {a.size}, 16])"),
            ("MEMORY", f"BlockedLayout([1, 8], [{32 // wide}, {wide}], [4, 1], [1, 0])")))])

    def side(self, programs: int) -> int:
        """How many members take turns: those of one share no keys, blocks of one do.

        Where blocks differ, the longest of all members come first, or of about as many as leave
        programs the least unlike; that their keys are in no cache together costs less.
        """
        if not self.a.causal:
            return 1
        if programs == self.members * self.blocks:
            return self.members
        return _evenest(self.members, self.blocks, programs, self.members)

    def copying(self) -> str:
        """What the warps do that copy keys and values."""
        text = _COPIES
        for letter, tensor in (("K", self.a.k), ("V", self.a.v)):
            sizes = self.axes(tensor).sizes
            text = text.replace(f"{letter}_MEMBER", ", ".join((
                "batch" if sizes[0] > 1 else "0", "head // SHARED" if sizes[1] > 1 else "0")))
        return text

    def attending(self) -> list[str]:
        a = self.a
        q, out = self.axes(a.q), self.axes(a.out)
        logarithms = ""
        if a.sums is not None:
            sums = self.axes(Tensor(a.sums.name, (*a.sums.shape, 1), a.sums.dtype))
            logarithms = _LOGARITHMS.format(place=_place(sums, 0),
                                            stride=sums.strides[2]) + "\n"
        more = _MORE_CHECKED if a.causal and self.tiles.keys % self.rows else ""
        checked = self.checked()
        inner = f"    if checked:\n{_indented(checked, 2)}" if more else ""
        outer = f"        at = (count - 1) * KEYS\n{_indented(checked, 2)}" if checked else ""
        return [_WEIGHED.replace("CHECKS\n", inner),
                _ATTENDS.replace("MORE\n", f"{more}\n" if more else "")
                .replace("LOGARITHMS\n", logarithms).replace("CHECKS\n", outer)
                .replace("Q_PLACE", _place(q, a.q.offset))
                .replace("OUT_PLACE", _place(out, a.out.offset))
                .replace("Q_STRIDE", str(q.strides[2])).replace("OUT_STRIDE", str(out.strides[2]))
                .replace("CHECKED_FROM", "checked" if more else "1")]

    def checked(self) -> str:
        """The lines that leave out the scores of keys that are not seen."""
        ends = ["(key < LENGTH)[None, :]"] if _known(self.a.keys) % self.tiles.keys else []
        ends += ["(query[:, None] >= key[None, :])"] if self.a.causal else []
        return _CHECKED.format(conditions=" & ".join(ends)) if ends else ""

    def lines(self) -> list[str]:
        """The kernel: descriptors, shared memory, barriers, and who does what."""
        a, groups = self.a, self.tiles.groups
        sums = self.pointers[a.sums] if a.sums is not None else self.pointers[a.out]
        given = f"{self.pointers[a.q]}, {self.pointers[a.out]}, {sums}"
        lines = ["rows: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)",
                 "deep: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)",
                 f"dtype: gl.constexpr = {self.pointers[a.q]}.dtype.element_ty"]
        for letter, tensor in (("k", a.k), ("v", a.v)):
            lines += self.described(letter, tensor)
        lines += [f"{letter}_tiles = gl.allocate_shared_memory(dtype, "
                  "[STAGES, 1, 1, KEYS, SIZE], deep)" for letter in "kv"]
        lines += ["q_tiles = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, SIZE], rows)"]
        bars = [f"{letter}_{state}" for letter in "kv" for state in ("ready", "empty")]
        lines += [f"{bar} = gl.allocate_shared_memory(gl.int64, [STAGES, 1], "
                  "mbarrier.MBarrierLayout())" for bar in bars]
        lines += ["for stage in gl.static_range(STAGES):",
                  *(f"    mbarrier.init({bar}.index(stage), count="
                    f"{'1' if 'ready' in bar else 'GROUPS'})" for bar in bars),
                  "fence_async_shared()",
                  f"pointers = ({given})", "tiles = (k_tiles, v_tiles)",
                  f"bars = ({', '.join(bars)})",
                  "gl.warp_specialize([",
                  *(f"    (attends, (pointers, q_tiles.index({n}), tiles, bars, {n})),"
                    for n in range(groups)),
                  "    (copies, ((k_rows, v_rows), tiles, bars)),"]
        _, attending, copying = _REGISTERS[groups]
        lines.append(f"], {[*[4] * (groups - 1), 1]}, {[*[attending] * (groups - 1), copying]})")
        return [f"    {line}" for line in lines]

    def described(self, letter: str, tensor: Tensor) -> list[str]:
        """A descriptor of all keys or values, some rows of one head at a time."""
        axes, offset = self.axes(tensor), tensor.offset
        # The stride of an axis of one place is never used, but has to be one.
        strides = [n or self.a.size * axes.sizes[2] for n in axes.strides]
        base = self.pointers[tensor] + (f" + {offset}" if offset != 0 else "")
        return [f"{letter}_rows = tma.make_tensor_descriptor(",
                f"    {base}, [{', '.join(map(str, axes.sizes))}, SIZE],",
                f"    [{', '.join(map(str, strides))}, 1], [1, 1, KEYS, SIZE], deep)"]


def _place(axes: _Axes, offset: object) -> str:
    """Where a head begins, in 64 bits."""
    return (f"batch.to(gl.int64) * {axes.strides[0]} + head.to(gl.int64) * {axes.strides[1]}"
            + (f" + {offset}" if offset != 0 else ""))


def _indented(text: str, levels: int) -> str:
    return "".join("    " * levels + line + "\n" for line in text.splitlines())


@lru_cache(maxsize=256)
def _evenest(members: int, blocks: int, programs: int, most: int) -> int:
    """Of numbers of members that take turns the one that leaves programs the least unlike."""
    if members * blocks > _MOST_PLANNED:
        return most
    few = range(max(1, most // 3), most + 1)
    return min(few, key=lambda side: (_longest(members, blocks, programs, side), -side))


def _longest(members: int, blocks: int, programs: int, side: int) -> int:
    """The work of the program that has the most, in blocks of keys."""
    work = [0] * programs
    for tile in range(members * blocks):
        turn, place = divmod(tile, programs)
        here = min(side, members - tile // (side * blocks) * side)
        work[place if turn % 2 == 0 else programs - 1 - place] += (
            blocks - tile % (side * blocks) // here + 1)
    return max(work)


# ---------------------------------------------------------------- functions of the module
_PLACE = '''
@gluon.jit
def place_of(turn):
    """The tile of queries of a turn: its member, block, and how many tiles of keys it sees."""
    mine = gl.program_id(0)
    tile = turn * PROGRAMS + gl.where(turn % 2 == 0, mine, PROGRAMS - 1 - mine)
    before = tile // (SIDE * BLOCKS) * SIDE
    side = gl.minimum(SIDE, MEMBERS - before)
    rest = tile - before * BLOCKS
    block = BLOCKS - 1 - rest // side  # the longest first
    member = before + rest % side
    seen = gl.minimum((block + 1) * (ROWS * GROUPS), LENGTH) if CAUSAL else LENGTH + block * 0
    return member // HEADS, member % HEADS, block, (seen + KEYS - 1) // KEYS


@gluon.jit
def turns():
    """How many tiles of queries this program has: every second round goes backwards."""
    whole: gl.constexpr = MEMBERS * BLOCKS // PROGRAMS
    mine = gl.program_id(0)
    last = mine if whole % 2 == 0 else PROGRAMS - 1 - mine
    return whole + (last < MEMBERS * BLOCKS % PROGRAMS).to(gl.int32)
'''.strip()

_COPIES = '''
copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def put(rows, batch, head, at, ready, empty, tiles, step):
    """Copy a tile into its place in the ring, as soon as that is empty."""
    stage = step % STAGES
    mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
    mbarrier.expect(ready.index(stage), KEYS * SIZE * 2)
    copy_tile(rows, [batch, head, at, 0], ready.index(stage), tiles.index(stage))


@gluon.jit
def copies(rows, tiles, bars):
    """Copy keys and values in the order in which they are multiplied: the last come first."""
    k_rows, v_rows = rows
    k_tiles, v_tiles = tiles
    k_ready, k_empty, v_ready, v_empty = bars
    step = 0
    for turn in range(turns()):
        batch, head, _, count = place_of(turn)
        put(k_rows, K_MEMBER, (count - 1) * KEYS, k_ready, k_empty, k_tiles, step)
        for done in range(1, count):
            at = (count - 1 - done) * KEYS
            put(k_rows, K_MEMBER, at, k_ready, k_empty, k_tiles, step + 1)
            put(v_rows, V_MEMBER, at + KEYS, v_ready, v_empty, v_tiles, step)
            step += 1
        put(v_rows, V_MEMBER, 0, v_ready, v_empty, v_tiles, step)
        step += 1
'''.strip()

# What is left out of the scores of tiles that hold some unseen keys.
_CHECKED = '''
key = at + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
query = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES)) + first
seen = {conditions}
scores = gl.where(seen, scores, float("-inf"))
'''.strip()

_WEIGHED = '''
@gluon.jit
def weighed(q_tile, factors, sums, largest, total, tiles, bars, step, at, first, more,
            checked: gl.constexpr):
    """Multiply the next scores and the last weights, and weigh the scores meanwhile."""
    k_tiles, v_tiles = tiles
    k_ready, k_empty, v_ready, v_empty = bars
    stage, before = (step + 1) % STAGES, step % STAGES
    k = k_tiles.index(stage).reshape([KEYS, SIZE]).permute([1, 0])
    nothing = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    scoring = warpgroup_mma(q_tile, k, nothing, use_acc=False, is_async=True)
    mbarrier.wait(v_ready.index(before), step // STAGES & 1)
    v = v_tiles.index(before).reshape([KEYS, SIZE])
    summing = warpgroup_mma(factors, v, sums, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(scoring,))
    mbarrier.arrive(k_empty.index(stage), count=1)
CHECKS
    larger = gl.maximum(largest, gl.max(scores, axis=1) * SCALE)
    weights = gl.exp2(scores * SCALE - larger[:, None])
    correction = gl.exp2(largest - larger)
    total = total * correction + gl.sum(weights, axis=1)
    factors = gl.convert_layout(weights.to(factors.dtype), factors.type.layout)
    # This wait, which hardly ever takes time, ends a block of instructions. Without it ptxas moves
    # the weights behind the wait for the sums, and so they would not hide behind the products.
    following = step + 2
    mbarrier.wait(k_ready.index(following % STAGES), following // STAGES & 1, pred=more)
    sums, factors, total, correction = warpgroup_mma_wait(
        0, deps=(summing, factors, total, correction))
    mbarrier.arrive(v_empty.index(before), count=1)
    by_sums: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    sums = sums * gl.convert_layout(correction, by_sums)[:, None]
    return factors, sums, larger, total
'''.strip()


_ATTENDS = '''
@gluon.jit
def attends(pointers, q_tile, tiles, bars, group: gl.constexpr):
    """Attend for the queries of one group of warps, tile by tile."""
    q_ptr, out_ptr, sums_ptr = pointers
    k_tiles, v_tiles = tiles
    k_ready, k_empty, v_ready, v_empty = bars
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    factor: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    lane = gl.arange(0, ROWS, gl.SliceLayout(1, MEMORY))
    column = gl.arange(0, SIZE, gl.SliceLayout(0, MEMORY))[None, :]
    nothing = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    step = 0
    for turn in range(turns()):
        batch, head, block, count = place_of(turn)
        first = block * (ROWS * GROUPS) + group * ROWS
        row = (first + lane)[:, None]
        q_head = q_ptr + Q_PLACE
        q = gl.load(q_head + (row * Q_STRIDE + column), mask=row < QUERIES, other=0)
        q_tile.store(q)
        fence_async_shared()
        stage = step % STAGES
        mbarrier.wait(k_ready.index(stage), step // STAGES & 1)
        k = k_tiles.index(stage).reshape([KEYS, SIZE]).permute([1, 0])
        scoring = warpgroup_mma(q_tile, k, nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scoring,))
        mbarrier.arrive(k_empty.index(stage), count=1)
CHECKS
        largest = gl.maximum(gl.max(scores, axis=1) * SCALE, LOWEST)
        weights = gl.exp2(scores * SCALE - largest[:, None])
        total = gl.sum(weights, axis=1)
        factors = gl.convert_layout(weights.to(dtype), factor)
        sums = gl.zeros([ROWS, SIZE], gl.float32, SUMS)
        mbarrier.wait(k_ready.index((step + 1) % STAGES), (step + 1) // STAGES & 1, pred=count > 1)
MORE
        for done in range(CHECKED_FROM, count):
            factors, sums, largest, total = weighed(
                q_tile, factors, sums, largest, total, tiles, bars, step,
                (count - 1 - done) * KEYS, first, done + 1 < count, False)
            step += 1
        before = step % STAGES
        mbarrier.wait(v_ready.index(before), step // STAGES & 1)
        v = v_tiles.index(before).reshape([KEYS, SIZE])
        summing = warpgroup_mma(factors, v, sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=(summing,))
        mbarrier.arrive(v_empty.index(before), count=1)
        step += 1
LOGARITHMS
        sums = sums * gl.convert_layout(1 / total, gl.SliceLayout(1, SUMS))[:, None]
        q_tile.store(sums.to(dtype))  # so that rows are stored in long pieces
        out_head = out_ptr + OUT_PLACE
        gl.store(out_head + (row * OUT_STRIDE + column), q_tile.load(MEMORY), mask=row < QUERIES)
'''.strip()

# Tiles of keys before the last ones of which some queries do not see all.
_MORE_CHECKED = '''
        checked = gl.maximum(count - (block * (ROWS * GROUPS) + 1) // KEYS, 1)
        checked = gl.minimum(checked, count)
        for done in range(1, checked):
            factors, sums, largest, total = weighed(
                q_tile, factors, sums, largest, total, tiles, bars, step,
                (count - 1 - done) * KEYS, first, done + 1 < count, True)
            step += 1
'''.strip("\n")

_LOGARITHMS = '''
        query = first + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
        logarithms = (largest + gl.log2(total)) * 0.6931471805599453
        logarithms = gl.where(total == 0, float("inf"), logarithms)
        sums_head = sums_ptr + {place}
        gl.store(sums_head + query * {stride}, logarithms, mask=query < QUERIES)
'''.strip("\n")
