"""How values lie that a forward pass saves for its backward pass: as convolutions make them.

Convolutions read and write channels last. What AOTAutograd saves of them is nobody's but ours, so
it is not turned around for the time in between, as torch would have it. The forward pass says so
in what it knows of its outputs; AOTAutograd hands that to whoever compiles the backward pass.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from terrazzo.torch.aten.shapes import PARTS, VIEWS
from terrazzo.torch.convert import is_tangent, refusal

_CONVOLUTION = "aten.convolution.default"
_SAME = frozenset(("aten.alias.default", "aten.detach.default"))  # views of all there is
_KEEP_LAYOUT = frozenset((  # beside what works element by element
    "aten.max_pool2d_with_indices.default", "aten.avg_pool2d.default",
    "aten.native_batch_norm.default", "aten._native_batch_norm_legit_functional.default"))


def lay_saved(gm: GraphModule) -> None:
    """Let what a forward pass saves lie with channels last, where convolutions make or read it."""
    context = torch._guards.TracingContext.try_get()
    if context is None or context.fw_metadata is None or context.output_strides is None:
        return
    meta = context.fw_metadata
    if meta.num_symints_saved_for_bw != 0:  # sizes vary, or nobody knows what is saved
        return
    output = next(n for n in gm.graph.nodes if n.op == "output")
    found = list(output.args[0])[len(meta.tokens):]  # torch counts results without those of effects
    users = set(found[:meta.num_forward])  # a user sees how these lie
    last = _channels_last(gm)
    for node in found[meta.tensors_saved_for_backwards_slice]:
        if node in last and node not in users:
            _lay(node, _turned(node.meta["val"]))
    context.output_strides.extend(_strides(n) for n in found)


def saved_inputs(gm: GraphModule, given: Sequence[Any]) -> list[Node]:
    """The inputs of a backward pass that were saved for it, lying as the forward pass made them.

    Hooks may hand back others, so whoever calls our code looks at them (`program.py`).
    """
    found: list[Node] = []
    for node, fake in zip((n for n in gm.graph.nodes if n.op == "placeholder"), given):
        known = node.meta.get("val")
        if is_tangent(node) or not isinstance(known, torch.Tensor) or refusal(known) is not None:
            continue
        if _is_fixed(known) and tuple(fake.stride()) != tuple(known.stride()):
            _lay(node, fake)
        found.append(node)
    return found


def _channels_last(gm: GraphModule) -> set[Node]:
    """Images that convolutions make, and what is made of those without a change of layout."""
    found: set[Node] = set()
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        if str(node.target) == _CONVOLUTION or (
                _keeps_layout(node) and any(n in found for n in node.all_input_nodes)):
            val = node.meta.get("val")
            if isinstance(val, (tuple, list)) or _is_image(val):
                found.add(node)
    return found


def _keeps_layout(node: Node) -> bool:
    if node.target is operator.getitem or str(node.target) in _SAME | _KEEP_LAYOUT:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and (
        torch.Tag.pointwise in node.target.tags)


def _is_image(val: Any) -> bool:
    """Whether a value is a batch of images of fixed sizes, row by row, of several channels."""
    return isinstance(val, torch.Tensor) and val.dim() == 4 and _is_fixed(val) and (
        val.shape[1] > 1 and val.shape[2] * val.shape[3] > 1) and val.is_contiguous()


def _is_fixed(val: Any) -> bool:
    return all(isinstance(n, int) for n in (*val.shape, *val.stride()))


def _lay(node: Node, fake: Any) -> None:
    """Let a value lie like this one, if no view of it has a layout that follows from its own."""
    alike = [node]
    for one in alike:
        for user in one.users:
            if str(user.target) in _SAME:
                alike.append(user)
            elif str(user.target) in VIEWS or str(user.target) in PARTS:
                return
    for one in alike:
        one.meta["val"] = fake


def _turned(fake: Any) -> Any:
    with fake.fake_mode:
        return torch.empty_like(fake, memory_format=torch.channels_last)


def _strides(node: Any) -> tuple[int, ...] | None:
    val = node.meta.get("val") if isinstance(node, Node) else None
    return tuple(val.stride()) if isinstance(val, torch.Tensor) and _is_fixed(val) else None
