"""Thirty operators as practitioners write them, for terrazzo and for torch, with sizes of practice.

The terrazzo form is plain maths under `@tz.op`. The torch form is torch's own fused function where
there is one, otherwise plain torch as one writes it. Both take the same tensors in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import terrazzo as tz

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Kind:
    """One operator in two forms; `wrt` says by which inputs it is differentiated, if by any.

    `tolerance` is for results that jump: an error of rounding may be as large as the step.
    """

    name: str
    group: str
    inputs: Callable[[torch.dtype], Tensors]
    ours: Callable[..., Any]
    torch: Callable[..., Any]
    wrt: tuple[int, ...] = ()
    tolerance: float | None = None


KINDS: list[Kind] = []


def kind(name: str, group: str, inputs: Callable[[torch.dtype], Tensors], peer: Callable[..., Any],
         wrt: tuple[int, ...] = (), tolerance: float | None = None, over: tuple[int, ...] = ()
         ) -> Callable[[Any], Any]:
    """Makes a kind of the operator that it decorates; `over`: inputs that results replace."""
    def add(ours: Any) -> Any:
        step = (lambda *given: ours(*given, out=tuple(given[i] for i in over))) if over else ours
        KINDS.append(Kind(name, group, inputs, step, peer, wrt, tolerance))
        return ours

    return add


# ---------------------------------------------------------------- inputs
def normal(*shapes: tuple[int, ...], scale: float = 1.0) -> Callable[[torch.dtype], Tensors]:
    """Tensors of normally distributed numbers."""
    return lambda dtype: tuple((torch.randn(s) * scale).to(dtype) for s in shapes)


def with_classes(shape: tuple[int, ...], *more: tuple[int, ...]
                 ) -> Callable[[torch.dtype], Tensors]:
    """Scores of rows, and the class of each row."""
    return lambda dtype: (torch.randn(shape).to(dtype), torch.randint(0, shape[1], shape[:1]),
                          *(torch.randn(s).to(dtype) for s in more))


# ---------------------------------------------------------------- activations
@kind("swiglu", "activation", normal((1024, 2816), (1024, 2816)),
      lambda gate, up: F.silu(gate) * up, (0, 1))
@tz.op
def swiglu(gate: Any, up: Any) -> Any:
    return gate * tz.sigmoid(gate) * up


@kind("gelu", "activation", normal((1024, 3072)), lambda x: F.gelu(x, approximate="tanh"), (0,))
@tz.op
def gelu(x: Any) -> Any:
    return 0.5 * x * (1 + tz.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))


@kind("squared relu", "activation", normal((1024, 3072)), lambda x: F.relu(x).square(), (0,))
@tz.op
def squared_relu(x: Any) -> Any:
    return tz.relu(x) ** 2


# ---------------------------------------------------------------- norms
@kind("layer norm", "norm", normal((2048, 1024), (1024,), (1024,)),
      lambda x, w, b: F.layer_norm(x, (1024,), w, b, 1e-5), (0, 1, 2))
@tz.op
def layer_norm(x: Any, weight: Any, bias: Any) -> Any:
    centred = x - tz.mean(x, axis=-1, keepdims=True)
    spread = tz.mean(centred**2, axis=-1, keepdims=True)
    return centred * tz.rsqrt(spread + 1e-5) * weight + bias


@kind("rms norm", "norm", normal((2048, 1024), (1024,)),
      lambda x, w: F.rms_norm(x, (1024,), w, 1e-6), (0, 1))
@tz.op
def rms_norm(x: Any, weight: Any) -> Any:
    return x * tz.rsqrt(tz.mean(x**2, axis=-1, keepdims=True) + 1e-6) * weight


@kind("batch norm", "norm", normal((16, 64, 56, 56), (64,), (64,)),
      lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), (0, 1, 2))
@tz.op
def batch_norm(x: Any, weight: Any, bias: Any) -> Any:
    mean = tz.mean(x, axis=(0, 2, 3), keepdims=True)
    var = tz.var(x, axis=(0, 2, 3), keepdims=True)
    return ((x - mean) * tz.rsqrt(var + 1e-5) * weight[None, :, None, None]
            + bias[None, :, None, None])


@kind("group norm", "norm", normal((8, 256, 28, 28), (256,), (256,)),
      lambda x, w, b: F.group_norm(x, 32, w, b), (0, 1, 2))
@tz.op
def group_norm(x: Any, weight: Any, bias: Any) -> Any:
    groups = tz.reshape(x, shape=(8, 32, 8, 28, 28))
    mean = tz.mean(groups, axis=(2, 3, 4), keepdims=True)
    var = tz.var(groups, axis=(2, 3, 4), keepdims=True)
    y = tz.reshape((groups - mean) * tz.rsqrt(var + 1e-5), shape=(8, 256, 28, 28))
    return y * weight[None, :, None, None] + bias[None, :, None, None]


# ---------------------------------------------------------------- losses
@kind("cross entropy", "loss", with_classes((256, 32000)), F.cross_entropy, (0,))
@tz.op
def cross_entropy(scores: Any, classes: Any) -> Any:
    picked = tz.take_along_axis(scores, classes[:, None], axis=1)[:, 0]
    return tz.mean(tz.logsumexp(scores, axis=1) - picked)


def torch_focal(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    p = torch.sigmoid(scores)
    plain = F.binary_cross_entropy_with_logits(scores, targets, reduction="none")
    agreement = p * targets + (1 - p) * (1 - targets)
    balance = 0.25 * targets + 0.75 * (1 - targets)
    return (balance * plain * (1 - agreement) ** 2).mean()


@kind("focal loss", "loss", lambda dtype: (torch.randn(8192, 80).to(dtype),
                                           (torch.rand(8192, 80) < 0.1).to(dtype)),
      torch_focal, (0,))
@tz.op
def focal_loss(scores: Any, targets: Any) -> Any:
    p = tz.sigmoid(scores)
    plain = tz.maximum(scores, 0) - scores * targets + tz.log1p(tz.exp(-tz.abs(scores)))
    agreement = p * targets + (1 - p) * (1 - targets)
    balance = 0.25 * targets + 0.75 * (1 - targets)
    return tz.mean(balance * plain * (1 - agreement) ** 2)


def torch_distillation(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    return F.kl_div(F.log_softmax(student / 2, -1), F.log_softmax(teacher / 2, -1),
                    reduction="batchmean", log_target=True) * 4


@kind("kl distillation", "loss", normal((512, 8192), (512, 8192)), torch_distillation, (0,))
@tz.op
def distillation(student: Any, teacher: Any) -> Any:
    known, wanted = tz.log_softmax(student / 2), tz.log_softmax(teacher / 2)
    return tz.sum(tz.exp(wanted) * (wanted - known)) / student.shape[0] * 4


def torch_contrastive(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    scores = F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T / 0.07
    labels = torch.arange(len(a))
    return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2


@kind("contrastive loss", "loss", normal((512, 512), (512, 512)), torch_contrastive, (0, 1))
@tz.op
def contrastive(a: Any, b: Any) -> Any:
    a = a * tz.rsqrt(tz.sum(a * a, axis=-1, keepdims=True))
    b = b * tz.rsqrt(tz.sum(b * b, axis=-1, keepdims=True))
    scores = a @ b.T / 0.07
    pairs = tz.diagonal(scores)
    return (tz.mean(tz.logsumexp(scores, axis=1) - pairs)
            + tz.mean(tz.logsumexp(scores, axis=0) - pairs)) / 2


# ---------------------------------------------------------------- attention
HEADS = ((2, 8, 512, 64),) * 3
HALF = 0.125  # 64 ** -0.5, the scale of heads of 64


def positions(lib: Any, n: int) -> tuple[Any, Any]:
    """The place of each query and of each key, to be compared with one another."""
    place = tz.arange(start=0, stop=n) if lib is tz else torch.arange(n)
    return place[:, None], place[None, :]


@kind("causal attention", "attention", normal(*HEADS),
      lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), (0, 1, 2))
@tz.op
def causal_attention(q: Any, k: Any, v: Any) -> Any:
    query, key = positions(tz, q.shape[2])
    scores = q @ tz.swapaxes(k, axis1=-1, axis2=-2) * HALF
    return tz.softmax(tz.where(key <= query, scores, float("-inf"))) @ v


def torch_alibi(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    slopes = 2.0 ** -torch.arange(1, 9, dtype=q.dtype)
    query, key = positions(torch, q.shape[2])
    bias = slopes[:, None, None] * (key - query)
    bias = torch.where(key <= query, bias, float("-inf")).to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


@kind("alibi attention", "attention", normal(*HEADS), torch_alibi, (0, 1, 2))
@tz.op
def alibi_attention(q: Any, k: Any, v: Any) -> Any:
    slopes = 2.0 ** -tz.astype(tz.arange(start=1, stop=9), dtype=q.dtype)
    query, key = positions(tz, q.shape[2])
    bias = slopes[:, None, None] * tz.astype(key - query, dtype=q.dtype)
    scores = q @ tz.swapaxes(k, axis1=-1, axis2=-2) * HALF + bias
    return tz.softmax(tz.where(key <= query, scores, float("-inf"))) @ v


def torch_window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    query, key = positions(torch, q.shape[2])
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=(key <= query) & (key > query - 128))


@kind("sliding window attention", "attention", normal(*HEADS), torch_window, (0, 1, 2))
@tz.op
def window_attention(q: Any, k: Any, v: Any) -> Any:
    query, key = positions(tz, q.shape[2])
    scores = q @ tz.swapaxes(k, axis1=-1, axis2=-2) * HALF
    seen = (key <= query) & (key > query - 128)
    return tz.softmax(tz.where(seen, scores, float("-inf"))) @ v


@kind("grouped heads attention", "attention",
      normal((2, 8, 512, 64), (2, 2, 512, 64), (2, 2, 512, 64)),
      lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
      (0, 1, 2))
@tz.op
def grouped_attention(q: Any, k: Any, v: Any) -> Any:
    k, v = tz.repeat(k, repeats=4, axis=1), tz.repeat(v, repeats=4, axis=1)
    query, key = positions(tz, q.shape[2])
    scores = q @ tz.swapaxes(k, axis1=-1, axis2=-2) * HALF
    return tz.softmax(tz.where(key <= query, scores, float("-inf"))) @ v


def torch_capped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    query, key = positions(torch, q.shape[2])
    scores = 30 * torch.tanh(q @ k.transpose(-1, -2) * HALF / 30)
    return torch.softmax(scores.masked_fill(key > query, float("-inf")), -1) @ v


@kind("soft-capped attention", "attention", normal(*HEADS), torch_capped, (0, 1, 2))
@tz.op
def capped_attention(q: Any, k: Any, v: Any) -> Any:
    query, key = positions(tz, q.shape[2])
    scores = 30 * tz.tanh(q @ tz.swapaxes(k, axis1=-1, axis2=-2) * HALF / 30)
    return tz.softmax(tz.where(key <= query, scores, float("-inf"))) @ v


# ---------------------------------------------------------------- routing
EXPERTS, PLACES = 8, 320  # experts, and how many tokens each may take


def wide(x: Any) -> Any:
    """At least float32: what is compared, to choose by, is not rounded to bfloat16 first."""
    if isinstance(x, torch.Tensor):
        return x.to(torch.promote_types(x.dtype, torch.float32))
    return x if x.dtype.name == "float64" else tz.astype(x, dtype="float32")


def torch_routing(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
                  ) -> torch.Tensor:
    share, expert = torch.topk(torch.softmax(wide(x) @ wide(gate), -1), 2)
    share = (share / share.sum(-1, keepdim=True)).reshape(-1).to(x.dtype)
    expert = expert.reshape(-1)
    chosen = F.one_hot(expert, EXPERTS)
    place = ((torch.cumsum(chosen, 0) - 1) * chosen).sum(-1)
    fits = place < PLACES
    slot = torch.where(fits, expert * PLACES + place, EXPERTS * PLACES)
    tokens = x.repeat_interleave(2, 0)
    boxes = torch.zeros(EXPERTS * PLACES + 1, x.shape[1], dtype=x.dtype).index_copy(0, slot, tokens)
    hidden = F.relu(boxes[:-1].view(EXPERTS, PLACES, -1) @ up)
    results = F.pad((hidden @ down).view(EXPERTS * PLACES, -1), (0, 0, 0, 1))
    return (results[slot] * share[:, None]).view(len(x), 2, -1).sum(1)


@kind("top-2 routing", "routing",
      lambda dtype: tuple((torch.randn(s) * f).to(dtype) for s, f in (
          ((1024, 512), 1.0), ((512, EXPERTS), 0.1), ((EXPERTS, 512, 512), 0.05),
          ((EXPERTS, 512, 512), 0.05))), torch_routing, (0, 1, 2, 3))
@tz.op
def routing(x: Any, gate: Any, up: Any, down: Any) -> Any:
    share, expert = tz.topk(tz.softmax(wide(x) @ wide(gate)), k=2)
    share = tz.reshape(share / tz.sum(share, axis=-1, keepdims=True), shape=(-1,))
    share = tz.astype(share, dtype=x.dtype)
    expert = tz.reshape(expert, shape=(-1,))
    chosen = tz.one_hot(expert, num_classes=EXPERTS, dtype="int32")
    place = tz.sum((tz.cumsum(chosen, axis=0) - 1) * chosen, axis=-1)
    slot = tz.where(place < PLACES, expert * PLACES + place, EXPERTS * PLACES)
    tokens = tz.repeat(x, repeats=2, axis=0)
    empty = tz.zeros(shape=(EXPERTS * PLACES + 1, x.shape[1]), dtype=x.dtype)
    boxes = tz.index_update(empty, slot, tokens, axis=0)[:-1]
    hidden = tz.relu(tz.reshape(boxes, shape=(EXPERTS, PLACES, -1)) @ up)
    results = tz.pad(tz.reshape(hidden @ down, shape=(EXPERTS * PLACES, -1)), ((0, 1), (0, 0)))
    answers = tz.take(results, slot, axis=0) * share[:, None]
    return tz.sum(tz.reshape(answers, shape=(x.shape[0], 2, -1)), axis=1)


# ---------------------------------------------------------------- scans
@kind("cumulative sum", "scan", normal((1024, 4096)), lambda x: torch.cumsum(x, -1), (0,))
@tz.op
def cumulative_sum(x: Any) -> Any:
    return tz.cumsum(x, axis=-1)


def torch_recurrence(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    h, states = torch.zeros_like(b[0]), []
    for decay, x in zip(torch.sigmoid(a), b, strict=True):
        h = decay * h + x
        states.append(h)
    return torch.stack(states)


@kind("linear recurrence", "scan", normal((256, 8, 512), (256, 8, 512)), torch_recurrence, (0, 1))
@tz.op
def recurrence(a: Any, b: Any) -> Any:
    def step(h: Any, row: Any) -> Any:
        decay, x = row
        h = decay * h + x
        return h, h

    return tz.scan(step, tz.zeros_like(b[0]), (tz.sigmoid(a), b))[1]


def cell_inputs(gates: int) -> Callable[[torch.dtype], Tensors]:
    """A sequence, and weights and biases as torch's recurrent layers have them."""
    steps, batch, size, hidden = 64, 16, 128, 256
    shapes = ((gates * hidden, size), (gates * hidden, hidden), (gates * hidden,),
              (gates * hidden,))
    return lambda dtype: (torch.randn(steps, batch, size).to(dtype),
                          *((torch.rand(s) - 0.5).mul(2 / hidden**0.5).to(dtype) for s in shapes))


def torch_rnn(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    h = torch.zeros(1, x.shape[1], 256, dtype=x.dtype)
    return torch.rnn_tanh(x, h, list(weights), True, 1, 0.0, False, False, False)[0]


@kind("rnn by scan", "scan", cell_inputs(1), torch_rnn, (0, 1, 2, 3, 4))
@tz.op
def rnn(x: Any, w: Any, u: Any, b: Any, c: Any) -> Any:
    def step(h: Any, row: Any) -> Any:
        h = tz.tanh(row + h @ u.T)
        return h, h

    return tz.scan(step, tz.zeros(shape=(x.shape[1], 256), dtype=x.dtype), x @ w.T + b + c)[1]


def torch_lstm(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    h = torch.zeros(1, x.shape[1], 256, dtype=x.dtype)
    return torch.lstm(x, (h, h), list(weights), True, 1, 0.0, False, False, False)[0]


@kind("lstm by scan", "scan", cell_inputs(4), torch_lstm, (0, 1, 2, 3, 4))
@tz.op
def lstm(x: Any, w: Any, u: Any, b: Any, c: Any) -> Any:
    def step(state: Any, row: Any) -> Any:
        h, cell = state
        i, f, g, o = tz.split(row + h @ u.T, indices_or_sections=4, axis=-1)
        cell = tz.sigmoid(f) * cell + tz.sigmoid(i) * tz.tanh(g)
        h = tz.sigmoid(o) * tz.tanh(cell)
        return (h, cell), h

    zeros = tz.zeros(shape=(x.shape[1], 256), dtype=x.dtype)
    return tz.scan(step, (zeros, zeros), x @ w.T + b + c)[1]


# ---------------------------------------------------------------- sampling
def torch_top_p(scores: torch.Tensor) -> torch.Tensor:
    scores = wide(scores)
    best = torch.topk(scores, 50).values
    p = torch.softmax(torch.where(scores >= best[:, -1:], scores, float("-inf")), -1)
    ordered = torch.sort(p, -1, descending=True).values
    before = torch.cumsum(ordered, -1) - ordered
    least = torch.where(before < 0.9, ordered, 1).amin(-1, keepdim=True)
    kept = torch.where(p >= least, p, 0)
    return kept / kept.sum(-1, keepdim=True)


@kind("top-k and top-p", "sampling", normal((8, 32000), scale=2.0), torch_top_p)
@tz.op
def top_p(scores: Any) -> Any:
    scores = wide(scores)
    best, _ = tz.topk(scores, k=50)
    p = tz.softmax(tz.where(scores >= best[:, -1:], scores, float("-inf")))
    ordered = tz.sort(p, descending=True)
    before = tz.cumsum(ordered, axis=-1) - ordered
    least = tz.min(tz.where(before < 0.9, ordered, 1.0), axis=-1, keepdims=True)
    kept = tz.where(p >= least, p, 0.0)
    return kept / tz.sum(kept, axis=-1, keepdims=True)


def torch_gumbel(scores: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    return torch.softmax((scores - torch.log(-torch.log(uniform))) / 0.7, -1)


@kind("gumbel softmax", "sampling", lambda dtype: (
    torch.randn(128, 8192).to(dtype), (torch.rand(128, 8192) * 0.98 + 0.01).to(dtype)),
      torch_gumbel, (0,))
@tz.op
def gumbel(scores: Any, uniform: Any) -> Any:
    return tz.softmax((scores - tz.log(-tz.log(uniform))) / 0.7)


# ---------------------------------------------------------------- optimiser steps
# In place, as torch's optimisers are.
PARAMETERS = (1024, 1024)
STEP = torch.tensor(10.0)
ADAM = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": False, "maximize": False}


def state(count: int) -> Callable[[torch.dtype], Tensors]:
    """Parameters, their gradient, and what an optimiser remembers (which may be squares)."""
    return lambda dtype: tuple(torch.rand(PARAMETERS).add(0.5).to(dtype) for _ in range(count))


def torch_sgd(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor) -> Tensors:
    if p.dtype is torch.bfloat16:  # torch 2.13's fused step gives a wrong momentum in bfloat16
        m.mul_(0.9).add_(g)
        p.add_(m, alpha=-1e-3)
    else:
        torch._fused_sgd_([p], [g], [m], weight_decay=0.0, momentum=0.9, lr=1e-3, dampening=0.0,
                          nesterov=False, maximize=False, is_first_step=False)
    return p, m


@kind("sgd with momentum", "optimiser", state(3), torch_sgd, over=(0, 2))
@tz.op
def sgd(p: Any, g: Any, m: Any) -> Any:
    m = 0.9 * m + g
    return p - 1e-3 * m, m


def torch_adam(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> Tensors:
    torch._fused_adam_([p], [g], [m], [v], [], [STEP], weight_decay=0.0, **ADAM)
    return p, m, v


@kind("adam", "optimiser", state(4), torch_adam, over=(0, 2, 3))
@tz.op
def adam(p: Any, g: Any, m: Any, v: Any) -> Any:
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * g * g
    update = m / (1 - 0.9**10) / (tz.sqrt(v / (1 - 0.999**10)) + 1e-8)
    return p - 1e-3 * update, m, v


def torch_adamw(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> Tensors:
    torch._fused_adamw_([p], [g], [m], [v], [], [STEP], weight_decay=0.01, **ADAM)
    return p, m, v


@kind("adamw", "optimiser", state(4), torch_adamw, over=(0, 2, 3))
@tz.op
def adamw(p: Any, g: Any, m: Any, v: Any) -> Any:
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * g * g
    update = m / (1 - 0.9**10) / (tz.sqrt(v / (1 - 0.999**10)) + 1e-8)
    return p * (1 - 1e-3 * 0.01) - 1e-3 * update, m, v


def torch_lion(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor) -> Tensors:
    update = m.mul(0.9).add_(g, alpha=0.1).sign_()
    p.mul_(1 - 1e-4 * 0.01).add_(update, alpha=-1e-4)
    m.mul_(0.99).add_(g, alpha=0.01)
    return p, m


@kind("lion", "optimiser", state(3), torch_lion, over=(0, 2))
@tz.op
def lion(p: Any, g: Any, m: Any) -> Any:
    update = tz.sign(0.9 * m + 0.1 * g)
    return p * (1 - 1e-4 * 0.01) - 1e-4 * update, 0.99 * m + 0.01 * g


# ---------------------------------------------------------------- the rest of a model
def torch_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


@kind("rotary embedding", "model", normal((2, 16, 512, 64), (512, 64), (512, 64)), torch_rotary,
      (0,))
@tz.op
def rotary(x: Any, cos: Any, sin: Any) -> Any:
    a, b = tz.split(x, indices_or_sections=2, axis=-1)
    return x * cos + tz.concat(-b, a, axis=-1) * sin


@kind("embedding", "model", lambda dtype: (torch.randn(32000, 512).to(dtype),
                                           torch.randint(0, 32000, (2048,))),
      lambda table, rows: F.embedding(rows, table), (0,))
@tz.op
def embedding(table: Any, rows: Any) -> Any:
    return tz.take(table, rows, axis=0)


def torch_quantize(x: torch.Tensor) -> Tensors:
    scale = x.abs().amax(-1, keepdim=True) / 127
    q = torch.round(x / scale).clamp(-127, 127).to(torch.int8)
    return q.to(x.dtype) * scale, scale


@kind("quantise and dequantise", "model", normal((2048, 1024)), torch_quantize,
      tolerance=1 / 100)
@tz.op
def quantize(x: Any) -> Any:
    scale = tz.max(tz.abs(x), axis=-1, keepdims=True) / 127
    q = tz.astype(tz.clip(tz.round(x / scale), -127, 127), dtype="int8")
    return tz.astype(q, dtype=x.dtype) * scale, scale
