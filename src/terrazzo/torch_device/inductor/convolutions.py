"""Convolutions in generated code, forward and backward: implicit products where these are quicker.

What follows a convolution (a bias, a norm's arithmetic, an activation) becomes part of its kernel.
The device's own operators stay for what the templates have not: three dimensions, transposed ones,
gradients of inputs that were convolved with strides, groups of few channels, sizes that vary.
"""

from __future__ import annotations

from dataclasses import replace
from operator import getitem
from typing import Any

import torch
from torch._inductor import config, ir
from torch._inductor.lowering import fallback_handler, lowerings, register_lowering
from torch._inductor.select_algorithm import (
    ExternKernelChoice,
    autotune_select_algorithm,
    realize_inputs,
)

from terrazzo.torch_device.inductor.convolution_templates import (
    Blocks,
    Shape,
    forward_template,
    parts_of,
    ranked_forward,
    ranked_gradient,
    weight_gradient_template,
)
from terrazzo.torch_device.inductor.operators import TYPES, define, is_ours
from terrazzo.triton_gcu.chip import description

aten, prims = torch.ops.aten, torch.ops.prims
FEW = 4  # channels of a group's results: below, most of a block is empty
_NUMBERS = "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups"


def _convolution(*args: Any) -> Any:
    return aten.convolution.default(*args).contiguous()


def _input_gradient(grad: Any, weight: Any, size: Any, *numbers: Any) -> Any:
    return _gradients(grad, grad.new_empty(size), weight, numbers, 0)


def _weight_gradient(grad: Any, x: Any, size: Any, *numbers: Any) -> Any:
    return _gradients(grad, x, grad.new_empty(size), numbers, 1)


def _gradients(grad: Any, x: Any, weight: Any, numbers: Any, wanted: int) -> Any:
    *sizes, groups = numbers
    found = aten.convolution_backward.default(
        grad, x, weight, None, *sizes, False, [0] * len(sizes[0]), groups,
        [wanted == n for n in range(3)])[wanted]
    return found.contiguous()


# Torch takes convolutions of a device that it does not know to lie row by row, whatever they are
# of; ours keep the channels last where they were. Nor is Inductor to bring them there.
CONVOLUTION = define(
    "convolution", _convolution,
    "Tensor x, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] dilation, "
    "bool transposed, SymInt[] output_padding, SymInt groups")
INPUT_GRADIENT = define("convolution_input_gradient", _input_gradient,
                        f"Tensor grad, Tensor weight, SymInt[] size, {_NUMBERS}")
WEIGHT_GRADIENT = define("convolution_weight_gradient", _weight_gradient,
                         f"Tensor grad, Tensor x, SymInt[] size, {_NUMBERS}")


def _own(operator: Any, called: str) -> Any:
    """The device's own operator, to be compared with templates."""
    return ExternKernelChoice(operator, None, name=called, has_out_variant=False,
                              op_overload=operator, use_fallback_kernel=True)


own_convolution = _own(CONVOLUTION, "gcu_own_convolution")
own_input_gradient = _own(INPUT_GRADIENT, "gcu_own_input_gradient")


# ---------------------------------------------------------------- graphs
def use_our_convolutions(graph: Any) -> None:
    """Make the convolutions of a graph, on the device, ours; and their gradients, each by itself.
    """
    for node in list(graph.nodes):
        if node.target is aten.convolution.default and is_ours(node.meta.get("val")):
            node.target = CONVOLUTION
        elif node.target is aten.convolution_backward.default and is_ours(
                node.args[0].meta.get("val")):
            _split_backward(graph, node)


def _split_backward(graph: Any, node: Any) -> None:
    """Each gradient by itself; those that we have no templates for are left together."""
    _, x, weight, *_, transposed, _, _, _ = node.args
    known = all(isinstance(n, int) for n in (*_sizes(x), *_sizes(weight)))
    if (transposed or not known or len(_sizes(weight)) not in (3, 4)
            or any(user.target is not getitem for user in node.users)):
        return
    for user in list(node.users):
        with graph.inserting_before(user):
            found = graph.call_function(*_gradient(node, user.args[1]))
            found.meta = dict(user.meta)
        user.replace_all_uses_with(found)
        graph.erase_node(user)
    graph.erase_node(node)


def _gradient(node: Any, wanted: int) -> tuple[Any, tuple[Any, ...]]:
    """What computes one result of a backward pass, and its arguments."""
    grad, x, weight, _, stride, padding, dilation, _, _, groups, _ = node.args
    numbers = stride, padding, dilation, groups
    if wanted == 0:
        return INPUT_GRADIENT, (grad, weight, _sizes(x), *numbers)
    if wanted == 1:
        return WEIGHT_GRADIENT, (grad, x, _sizes(weight), *numbers)
    return aten.sum.dim_IntList, (grad, [0, *range(2, 2 + len(stride))])


def _sizes(node: Any) -> list[Any]:
    return list(node.meta["val"].shape)


# ---------------------------------------------------------------- lowering
@register_lowering(CONVOLUTION, type_promotion_kind=None)
def _lower_convolution(x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any,
                       transposed: bool, output_padding: Any, groups: Any) -> Any:
    numbers = stride, padding, dilation, groups
    shape = None if transposed else _shape(x.get_size(), weight.get_size(), *numbers)
    if shape is None or not _is_quick(shape):
        return fallback_handler(CONVOLUTION, add_to_fallback_set=False)(
            x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    inputs = tuple(realize_inputs(_as_images(x), _as_images(weight), *_given(bias)))
    layout = _layout(shape, inputs[0])
    own = own_convolution.bind(
        inputs, layout, **({"bias": None} if bias is None else {}), **_numbers(shape),
        transposed=False, output_padding=[0, 0])
    found = _quickest("convolution", shape, own, inputs, layout)
    return lowerings[aten.squeeze.dim](found, 2) if len(stride) == 1 else found


@register_lowering(INPUT_GRADIENT, type_promotion_kind=None)
def _lower_input_gradient(grad: Any, weight: Any, size: Any, stride: Any, padding: Any,
                          dilation: Any, groups: Any) -> Any:
    shape = _shape(size, weight.get_size(), stride, padding, dilation, groups)
    if shape is None or not _is_quick(_turned(shape)) or (shape.stride_h, shape.stride_w) != (1, 1):
        return fallback_handler(INPUT_GRADIENT, add_to_fallback_set=False)(
            grad, weight, size, stride, padding, dilation, groups)
    grad, weight = realize_inputs(_as_images(grad), _as_images(weight))
    turned = _turned(shape)
    layout = _layout(turned, grad)
    own = own_input_gradient.bind((grad, weight), layout, size=[int(n) for n in layout.size],
                                  **_numbers(shape))
    found = _quickest("convolution_input_gradient", turned, own, (grad, weight), layout)
    return lowerings[aten.squeeze.dim](found, 2) if len(stride) == 1 else found


@register_lowering(WEIGHT_GRADIENT, type_promotion_kind=None)
def _lower_weight_gradient(grad: Any, x: Any, size: Any, stride: Any, padding: Any, dilation: Any,
                           groups: Any) -> Any:
    shape = _shape(x.get_size(), size, stride, padding, dilation, groups)
    dtype = grad.get_dtype()
    ranked = [] if shape is None or not _is_quick(shape) else ranked_gradient(
        description(), shape, dtype.itemsize, _depth(grad))
    if shape is None or not ranked:
        return fallback_handler(WEIGHT_GRADIENT, add_to_fallback_set=False)(
            grad, x, size, stride, padding, dilation, groups)
    blocks = ranked[0]
    grad, x = realize_inputs(_as_images(grad), _as_images(x))
    layout = ir.FixedLayout(grad.get_device(), torch.float32, [
        parts_of(shape, blocks), shape.results * shape.groups, shape.steps])
    choices: list[Any] = []
    _append(choices, weight_gradient_template, shape, blocks, (grad, x), layout,
            PIECES=blocks.pieces)
    parts, _ = autotune_select_algorithm("convolution_weight_gradient", choices, [grad, x], layout)
    total = lowerings[prims.convert_element_type.default](
        lowerings[aten.sum.dim_IntList](parts, [0]), dtype)
    return lowerings[aten.reshape.default](total, size)


def _quickest(kind: str, shape: Shape, own: Any, inputs: tuple[Any, ...], layout: Any) -> Any:
    """A convolution by the best block; tuned, three of them and our own operator are compared."""
    ranked = ranked_forward(description(), shape, layout.dtype.itemsize, _depth(inputs[0]))
    tuned = config.max_autotune or config.max_autotune_gemm
    choices: list[Any] = []
    for blocks in ranked[:3 if tuned else 1]:
        _append(choices, forward_template, shape, blocks, inputs, layout, BIASED=len(inputs) == 3)
    if tuned or not choices:
        choices.append(own)
    found, _ = autotune_select_algorithm(kind, choices, list(inputs), layout)
    return found


def _append(choices: list[Any], template: Any, shape: Shape, blocks: Blocks,
            inputs: tuple[Any, ...], layout: Any, **more: int) -> None:
    error = template.maybe_append_choice(
        choices, input_nodes=inputs, layout=layout, num_stages=1, num_warps=1,
        **shape.constants(), **blocks.constants(), **more)
    if error is not None:
        raise error


# ---------------------------------------------------------------- what is known of a convolution
def _shape(x: Any, weight: Any, stride: Any, padding: Any, dilation: Any, groups: Any
           ) -> Shape | None:
    """Sizes, as of images, where they are all known and we have a template for them."""
    sizes = [*x, *weight, *stride, *padding, *dilation, groups]
    if (len(x) != len(weight) or len(x) not in (3, 4) or not all(map(_is_known, sizes))
            or not all(int(n) > 0 for n in (*x, *weight))):
        return None
    groups, (images, channels, *inputs) = int(groups), map(int, x)
    results, _, *kernel = map(int, weight)
    (height, width), (kernel_h, kernel_w), (stride_h, stride_w), (dilation_h, dilation_w) = (
        _of_images(numbers, 1) for numbers in (inputs, kernel, stride, dilation))
    padding_h, padding_w = _of_images(padding, 0)
    return Shape(
        images, channels // groups, height, width, results // groups,
        (height + 2 * padding_h - dilation_h * (kernel_h - 1) - 1) // stride_h + 1,
        (width + 2 * padding_w - dilation_w * (kernel_w - 1) - 1) // stride_w + 1,
        kernel_h, kernel_w, stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w,
        groups)


def _of_images(numbers: Any, one_row: int) -> tuple[int, int]:
    """Those of rows and columns; signals have one row."""
    *rows, columns = map(int, numbers)
    return (rows[0] if rows else one_row), columns


def _is_known(size: Any) -> bool:
    return isinstance(size, int) or bool(getattr(size, "is_number", False))


def _turned(shape: Shape) -> Shape:
    """The convolution, of gradients with the weight turned round, that gives those of the input."""
    return replace(
        shape, channels=shape.results, height=shape.rows, width=shape.columns,
        results=shape.channels, rows=shape.height, columns=shape.width, flipped=True,
        padding_h=shape.dilation_h * (shape.kernel_h - 1) - shape.padding_h,
        padding_w=shape.dilation_w * (shape.kernel_w - 1) - shape.padding_w)


def _is_quick(shape: Shape) -> bool:
    """Whether a template is quicker than the device's own operator, which takes two launches.

    Windows are taken apart for all results of a block at once; where these are few, that alone may
    take longer than the launch that the template saves. So it was for the shapes that were tried.
    """
    chip = description()
    return shape.results >= FEW or shape.window_cycles(chip) < chip.launch_cycles


def _numbers(shape: Shape) -> dict[str, Any]:
    """What the device's own operators are told."""
    return {"stride": [shape.stride_h, shape.stride_w],
            "padding": [shape.padding_h, shape.padding_w],
            "dilation": [shape.dilation_h, shape.dilation_w], "groups": shape.groups}


def _given(bias: Any) -> list[Any]:
    return [] if bias is None else [bias]


def _as_images(x: Any) -> Any:
    """Signals are images of one row."""
    return lowerings[aten.unsqueeze.default](x, 2) if len(x.get_size()) == 3 else x


def _layout(shape: Shape, like: Any) -> Any:
    return ir.FixedLayout(like.get_device(), like.get_dtype(), [
        shape.images, shape.results * shape.groups, shape.rows, shape.columns])


def _depth(x: Any) -> int:
    return description().depth(TYPES[x.get_dtype()]) or 1
