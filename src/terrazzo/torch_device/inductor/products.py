"""Matrix products in generated code: templates, with blocks for the chip's matrix unit.

Inductor leaves products to a device's own operators unless it tunes, and takes templates for large
GPUs alone. So the products of our graphs become operators of our own (`use_templates`), which
are lowered to a template with the block that the description of the chip makes the quickest: what
follows a product (a bias, an activation) becomes part of its kernel. With `max_autotune` the three
best blocks and the device's own operator are run, and their modelled times decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.kernel.bmm import aten_bmm, bmm_grid
from torch._inductor.kernel.mm import aten_mm
from torch._inductor.kernel.mm_common import _is_static_problem, mm_args, mm_grid
from torch._inductor.kernel_inputs import MMKernelInputs
from torch._inductor.lowering import register_lowering
from torch._inductor.select_algorithm import (
    TritonTemplate,
    TritonTemplateKernel,
    autotune_select_algorithm,
)
from torch._inductor.template_heuristics.registry import register_template_heuristic
from torch._inductor.template_heuristics.triton import BaseConfigHeuristic, MMTemplateConfigMixin
from torch._inductor.virtualized import V
from triton import Config

from terrazzo.chips.gcu.blocks import POWERS, ranked_blocks
from terrazzo.torch_device.inductor.operators import TYPES, define, is_ours
from terrazzo.torch_device.start import name
from terrazzo.triton_gcu.chip import description

aten = torch.ops.aten
# Inductor's own templates take rows modulo their number, which the chip cannot foresee: masks are
# what its transfers understand. BATCH is empty, or what stands for one product among many.
TEMPLATE = """
{{def_kernel("A", "B")}}
    M = {{size("A", -2)}}
    N = {{size("B", -1)}}
    K = {{size("A", -1)}}
    across = tl.cdiv(N, BLOCK_N)
    rows = (tl.program_id(0) // across * BLOCK_M + tl.arange(0, BLOCK_M)).to(INDEX_DTYPE)
    columns = (tl.program_id(0) % across * BLOCK_N + tl.arange(0, BLOCK_N)).to(INDEX_DTYPE)
    idx_m = rows[:, None]
    idx_n = columns[None, :]
BATCH
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC_TYPE)
    for start in range(0, K, BLOCK_K):
        steps = start + tl.arange(0, BLOCK_K).to(INDEX_DTYPE)
        a = tl.load(A + idx_m * {{stride("A", -2)}} + steps[None, :] * {{stride("A", -1)}},
                    mask=(idx_m < M) & (steps[None, :] < K), other=0.0)
        b = tl.load(B + steps[:, None] * {{stride("B", -2)}} + idx_n * {{stride("B", -1)}},
                    mask=(steps[:, None] < K) & (idx_n < N), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    mask = (idx_m < M) & (idx_n < N)
    {{store_output((INDICES"idx_m", "idx_n"), "acc", "mask", val_shape=("BLOCK_M", "BLOCK_N"))}}
"""
ONE_OF_MANY = """
    idx_q = (tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)).to(INDEX_DTYPE)
    A += idx_q * {{stride("A", 0)}}
    B += idx_q * {{stride("B", 0)}}
    if idx_q >= {{size("A", 0)}}:
        return
"""
# What the source of a kernel begins with: it is all that a process which compiles it sees of us.
OUR_IMPORTS = "from terrazzo.torch_device.inductor import heuristics as triton_heuristics\n"


class ProductKernel(TritonTemplateKernel):
    """A kernel made of one of our templates."""

    @classmethod
    def gen_common_triton_imports(cls) -> str:
        found: str = super().gen_common_triton_imports()
        return found + OUR_IMPORTS


class ProductTemplate(TritonTemplate):
    """A template whose kernels are compiled for the chip in any process."""

    kernel_type = ProductKernel


mm_template = ProductTemplate(
    name="gcu_mm", grid=mm_grid,
    source=TEMPLATE.replace("BATCH", "").replace("INDICES", ""))
bmm_template = ProductTemplate(
    name="gcu_bmm", grid=bmm_grid,
    source=TEMPLATE.replace("BATCH", ONE_OF_MANY).replace("INDICES", '"idx_q", '))

OURS = {aten.mm.default: define("mm", torch.mm), aten.bmm.default: define("bmm", torch.bmm)}


# ---------------------------------------------------------------- graphs
def use_templates(graph: Any) -> None:
    """Make the products of a graph, on the device, ours."""
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_ours(node.meta.get("val")):
            continue
        if node.target in OURS and len(node.args) == 2 and not node.kwargs:
            node.target = OURS[node.target]
        elif node.target is aten.addmm.default and len(node.args) == 3 and not node.kwargs:
            _split_addmm(graph, node)


def _split_addmm(graph: Any, node: Any) -> None:
    added, a, b = node.args
    if any(x.meta["val"].dtype != node.meta["val"].dtype for x in node.args):
        return
    with graph.inserting_before(node):
        both = graph.call_function(OURS[aten.mm.default], (a, b))
        both.meta["val"] = torch.mm(a.meta["val"], b.meta["val"])
        total = graph.call_function(aten.add.Tensor, (both, added))
        total.meta = dict(node.meta)
    node.replace_all_uses_with(total)
    graph.erase_node(node)


# ---------------------------------------------------------------- lowering
class Factors(MMKernelInputs):
    """The factors of a product whose result lies row by row, as templates write it."""

    def output_layout(self, flexible: bool = True) -> Any:
        return super().output_layout(flexible=False)


def _lowered(kind: str, template: Any, own: Any, a: Any, b: Any, layout: Any) -> Any:
    *_, layout, a, b = mm_args(a, b, layout=layout)
    inputs = Factors([a, b])
    tuned = config.max_autotune or config.max_autotune_gemm
    _, has_elements = _is_static_problem(layout)
    templates = [template] if has_elements else []
    choices = V.choices.get_template_configs(inputs, [*templates, *([own] if tuned else [])], kind)
    if not choices:
        choices = V.choices.get_template_configs(inputs, [own], kind)
    node, _ = autotune_select_algorithm(kind, choices, inputs.nodes(), layout)
    return node


@register_lowering(OURS[aten.mm.default], type_promotion_kind=None)
def _mm(a: Any, b: Any, *, layout: Any = None) -> Any:
    return _lowered("mm", mm_template, aten_mm, a, b, layout)


@register_lowering(OURS[aten.bmm.default], type_promotion_kind=None)
def _bmm(a: Any, b: Any, *, layout: Any = None) -> Any:
    return _lowered("bmm", bmm_template, aten_bmm, a, b, layout)


# ---------------------------------------------------------------- blocks
@register_template_heuristic(mm_template.uid, name())
@register_template_heuristic(bmm_template.uid, name())
class Blocks(MMTemplateConfigMixin, BaseConfigHeuristic):
    """Blocks of products, the quickest first."""

    def should_run(self, inputs: Any) -> bool:
        return True

    def _get_template_configs_impl(self, kernel_inputs: Any, op_name: str, **given: Any
                                   ) -> Iterator[dict[str, Any]]:
        m, n, k = kernel_inputs.mnk_hinted()
        many = math.prod(V.graph.sizevars.optimization_hints(
            kernel_inputs.nodes()[0].get_size()[:-2]))
        size = kernel_inputs.dtype().itemsize
        depth = description().depth(TYPES[kernel_inputs.dtype()]) or 1
        ranked = ranked_blocks(description(), (m, n, k), many, size, depth, POWERS)
        tuned = config.max_autotune or config.max_autotune_gemm
        for rows, columns, length in ranked[:3 if tuned else 1]:
            blocks = Config({"BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": length}, num_warps=1,
                            num_stages=1)
            yield self._convert_config_to_template_kwargs(
                blocks, *kernel_inputs.mnk_symbolic(), kernel_inputs.out_dtype())
