"""Moving windows as ONNX describes them (kernel, strides, dilations, auto_pad), with padding
worked out: shared by convolutions and pooling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from terrazzo.base.shapes import Shape
from terrazzo.frontends.onnx.registry import Call
from terrazzo.graph.ir import Value
from terrazzo.index import Index, ceildiv, maximum, minimum

Pads = tuple[tuple[Index, Index], ...]


@dataclass(frozen=True)
class Windows:
    """A window that moves over the axes behind batch and channels."""

    size: Shape
    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: Pads  # (before, after) of each axis
    overhang: Shape  # how much of the padding after an axis ceil mode added (or left off)


def _numbers(call: Call, name: str, rank: int) -> tuple[int, ...]:
    given = call.attr(name)
    if given is None:
        return (1,) * rank
    if len(given) != rank or min(given) < 1:
        call.unsupported(f"has {name} {list(given)} for {rank} axes; as many numbers of at least "
                         "1 are needed")
    return tuple(given)


def explicit_pads(call: Call, rank: int) -> tuple[tuple[int, int], ...]:
    """The attribute `pads`, which lists all the beginnings and then all the ends."""
    given = call.attr("pads") or [0] * (2 * rank)
    if len(given) != 2 * rank or min(given) < 0:
        call.unsupported(f"has pads {list(given)} for {rank} axes; twice as many numbers of at "
                         "least 0 are needed")
    return tuple(zip(given[:rank], given[rank:], strict=True))


def halves(total: Index, extra_first: bool) -> tuple[Index, Index]:
    """Padding shared between both ends of an axis; one of them gets the odd element."""
    less = total // 2
    return (total - less, less) if extra_first else (less, total - less)


def reach(size: Index, dilation: int) -> Index:
    """How many neighbouring elements a window spans."""
    return (size - 1) * dilation + 1


def kernel_of(call: Call, weight: Value) -> Shape:
    """The size of the window, which the weight's shape gives if the attribute does not."""
    given = call.attr("kernel_shape")
    sizes = weight.shape[2:]
    if given and any(isinstance(n, int) and n != k for n, k in zip(sizes, given, strict=False)):
        call.unsupported(f"has kernel_shape {list(given)}, but a weight of {list(sizes)}")
    return sizes


def read_windows(call: Call, sizes: Sequence[Index], kernel: Shape, ceil: bool = False) -> Windows:
    """The node's window over axes of the given sizes.

    With `ceil`, what is left over at the end of an axis gets a window of its own, and is padded
    accordingly; not so if that window would begin in the padding.
    """
    rank = len(sizes)
    if len(kernel) != rank:
        call.unsupported(f"has a window of {len(kernel)} axes for {rank} axes of the input")
    strides, dilation = _numbers(call, "strides", rank), _numbers(call, "dilations", rank)
    mode = call.attr("auto_pad", "NOTSET")
    given = explicit_pads(call, rank) if mode == "NOTSET" else ((0, 0),) * rank
    padding: list[tuple[Index, Index]] = []
    overhang: list[Index] = [0] * rank
    for d, (lo, hi) in enumerate(given):
        size, span = sizes[d], reach(kernel[d], dilation[d])
        if mode in ("SAME_UPPER", "SAME_LOWER"):
            steps = ceildiv(size, strides[d])
            total = maximum((steps - 1) * strides[d] + span - size, 0)
            padding.append(halves(total, extra_first=mode == "SAME_LOWER"))
        elif mode not in ("NOTSET", "VALID"):
            call.unsupported(f"has an unknown auto_pad {mode!r}")
        elif ceil:
            steps = minimum(ceildiv(size + lo + hi - span, strides[d]) + 1,
                            ceildiv(size + lo, strides[d]))
            padding.append((lo, maximum((steps - 1) * strides[d] + span - size - lo, 0)))
            overhang[d] = padding[d][1] - hi
        else:
            padding.append((lo, hi))
    return Windows(kernel, strides, dilation, tuple(padding), tuple(overhang))
