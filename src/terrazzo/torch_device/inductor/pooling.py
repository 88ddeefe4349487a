"""The backward pass of max pooling in generated code: every input looks for the windows it won.

Inductor adds each gradient at the place that its window chose. Places that data decides are brought
and taken one granule at a time, so that such additions are the slowest thing that the chip does.
Here each input goes over the few windows that cover it, and adds the gradients of those that chose
it: rows that are foreseen, and part of whatever kernel wants the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, reduce
from itertools import product
from typing import Any

import torch
from torch._inductor.ir import Pointwise
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import ops
from torch.utils._sympy.functions import FloorDiv, Mod

from terrazzo.torch_device.inductor.operators import define, is_ours

aten, prims = torch.ops.aten, torch.ops.prims
_RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default,
             aten.unsqueeze.default)


def _by_indices(grad: Any, offsets: Any, kernel: Any, size: Any, stride: Any, padding: Any,
                dilation: Any) -> Any:
    indices = prims._low_memory_max_pool_offsets_to_indices(
        offsets, kernel, size, stride, padding, dilation)
    zeros = grad.new_zeros((*grad.shape[:-2], size[0] * size[1]))
    return zeros.scatter_add(-1, indices.flatten(-2), grad.flatten(-2)).unflatten(-1, size)


MAX_POOL_BACKWARD = define(
    "max_pool_backward", _by_indices,
    "Tensor grad, Tensor offsets, SymInt[] kernel, SymInt[] size, SymInt[] stride, "
    "SymInt[] padding, SymInt[] dilation")


# ---------------------------------------------------------------- graphs
def gather_pooled_gradients(graph: Any) -> None:
    """Make additions at the places that max pooling chose an operator of ours."""
    for node in list(graph.nodes):
        if node.target is not aten.scatter_add.default or not is_ours(node.meta.get("val")):
            continue
        into, dim, indices, grad = node.args
        chosen = _reshaped(indices)
        if (chosen.target is prims._low_memory_max_pool_offsets_to_indices.default
                and _fits(into, dim, chosen)):
            _replace(graph, node, chosen, grad)


def _fits(into: Any, dim: int, chosen: Any) -> bool:
    """Whether planes lie side by side in zeros, as the decomposition of max pooling has it.

    All of known sizes: conditions that hang on sizes are no better than places that data decides.
    """
    offsets, kernel, size, *_ = chosen.args
    shape = into.meta["val"].shape
    known = all(isinstance(n, int) for n in (*size, *shape, *offsets.meta["val"].shape))
    return (known and into.target is aten.full.default and into.args[1] == 0 and len(kernel) == 2
            and len(shape) == 2 and dim in (1, -1) and shape[1] == size[0] * size[1])


def _reshaped(node: Any) -> Any:
    while node.target in _RESHAPES:
        node = node.args[0]
    return node


def _replace(graph: Any, node: Any, chosen: Any, grad: Any) -> None:
    offsets, kernel, size, *rest = chosen.args
    value, shape = node.meta["val"], offsets.meta["val"].shape
    with graph.inserting_before(node):
        images = graph.call_function(aten.reshape.default, (grad, list(shape)))
        images.meta["val"] = grad.meta["val"].reshape(shape)
        found = graph.call_function(MAX_POOL_BACKWARD, (images, offsets, kernel, size, *rest))
        found.meta["val"] = value.new_empty((*shape[:-2], *size))
        flat = graph.call_function(aten.reshape.default, (found, list(value.shape)))
        flat.meta = dict(node.meta)
    node.replace_all_uses_with(flat)
    graph.erase_node(node)


# ---------------------------------------------------------------- lowering
@dataclass(frozen=True)
class Axis:
    """One direction of a pool."""

    kernel: int
    size: int  # of the input
    stride: int
    padding: int
    dilation: int
    windows: int

    @property
    def last(self) -> int:
        """How far the last element of a window is from its first."""
        return self.dilation * (self.kernel - 1)

    def covering(self, place: Any) -> Iterator[tuple[Any, Any, list[Any]]]:
        """Windows that may cover a place: each, which of its elements it is there, and when."""
        padded = place + self.padding
        for back in range(self.last // self.stride + 1):
            window = FloorDiv(padded, self.stride) - back
            distance = Mod(padded, self.stride) + back * self.stride
            yield window, FloorDiv(distance, self.dilation), self._when(padded, distance, back)

    def _when(self, padded: Any, distance: Any, back: int) -> list[Any]:
        """Conditions that do not hold everywhere."""
        found = []
        if back * self.stride > self.padding:
            found.append(ops.ge(_number(padded), _number(back * self.stride)))
        if self.size - 1 + self.padding >= (self.windows + back) * self.stride:
            found.append(ops.lt(_number(padded), _number((self.windows + back) * self.stride)))
        if (back + 1) * self.stride - 1 > self.last:
            found.append(ops.le(_number(distance), _number(self.last)))
        if self.dilation > 1:
            found.append(ops.eq(_number(Mod(distance, self.dilation)), _number(0)))
        return found


def _number(value: Any) -> Any:
    if isinstance(value, int):
        return ops.constant(value, torch.int32)
    return ops.index_expr(value, torch.int32)


@register_lowering(MAX_POOL_BACKWARD, type_promotion_kind=None)
def _max_pool_backward(grad: Any, offsets: Any, kernel: Any, size: Any, stride: Any, padding: Any,
                       dilation: Any) -> Any:
    grad.realize_hint()  # for each is read by several places
    gradient_at, offset_at = grad.make_loader(), offsets.make_loader()
    windows = map(int, offsets.get_size()[-2:])
    rows, columns = (Axis(*numbers) for numbers in zip(
        kernel, size, stride, padding, dilation, windows))

    def chosen(place: list[Any], element: Any) -> Any:
        won = ops.eq(ops.to_dtype(offset_at(place), torch.int32), _number(element))
        return ops.where(won, gradient_at(place), ops.constant(0.0, grad.get_dtype()))

    def sum_at(index: Any) -> Any:
        *image, y, x = index
        found = [_where(row_is + column_is,
                        partial(chosen, [*image, i, j], u * columns.kernel + v))
                 for (i, u, row_is), (j, v, column_is) in product(
                     rows.covering(y), columns.covering(x))]
        return reduce(ops.add, found)

    return Pointwise.create(device=grad.get_device(), dtype=grad.get_dtype(), inner_fn=sum_at,
                            ranges=[*grad.get_size()[:-2], *size])


def _where(conditions: list[Any], value: Callable[[], Any]) -> Any:
    return ops.masked(reduce(ops.and_, conditions), value, 0.0) if conditions else value()
