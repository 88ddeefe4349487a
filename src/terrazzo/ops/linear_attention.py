"""Linear attention: a matrix of state for each head that tokens write to and read from in turn.

The rules are those of ONNX's LinearAttention: plain sums, sums that decay (gated), corrections of
what the state answers already (delta rule), and both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from terrazzo.base.scalar import Const, Scalar
from terrazzo.base.shapes import dims_text
from terrazzo.dtypes import DType
from terrazzo.errors import ArgumentError, DTypeError, ShapeError, user_location
from terrazzo.expr.ir import fresh_axis
from terrazzo.graph.ir import TensorType
from terrazzo.index import Index
from terrazzo.index.guards import all_equal, ask, multiple
from terrazzo.loop.ir import Alloc, Block, Buffer, For, Stmt, Store, block
from terrazzo.ops.creation import full
from terrazzo.ops.define import operator, primitive
from terrazzo.ops.elementwise import astype, exp
from terrazzo.ops.shape import broadcast_to, reshape

RULES = ("linear", "gated", "delta", "gated_delta")


def _steps_type(query: TensorType, key: TensorType, value: TensorType, state: TensorType,
                *gates: TensorType, given: tuple[str, ...], scale: float
                ) -> tuple[TensorType, TensorType]:
    batch, steps, heads, keys = query.shape
    kv_heads, values = key.shape[2], value.shape[3]
    wanted = {"decay": (batch, steps, kv_heads, keys), "beta": (batch, steps, kv_heads, 1)}
    expected = [(batch, steps, kv_heads, keys), (batch, steps, kv_heads, values),
                (batch, kv_heads, keys, values), *(wanted[name] for name in given)]
    if kv_heads == 0 or not multiple(heads, kv_heads) or not all(
            all_equal(t.shape, shape)
            for t, shape in zip((key, value, state, *gates), expected, strict=True)):
        raise ShapeError(
            f"linear_attention_steps of queries {dims_text(query.shape)} cannot use keys "
            f"{dims_text(key.shape)}, values {dims_text(value.shape)} and a state "
            f"{dims_text(state.shape)}", where=user_location())
    if any(t.dtype is not query.dtype.compute for t in (query, key, value, state, *gates)):
        raise DTypeError("linear_attention_steps needs float32 or float64 throughout",
                         where=user_location(), hint="use tz.linear_attention, which widens")
    return TensorType((batch, steps, heads, values), query.dtype), state


def _steps_numpy(query: np.ndarray, key: np.ndarray, value: np.ndarray, state: np.ndarray,
                 *gates: np.ndarray, given: tuple[str, ...], scale: float, out: Any
                 ) -> tuple[np.ndarray, np.ndarray]:
    extra = dict(zip(given, gates, strict=True))
    batch, steps, heads, _ = query.shape
    group = heads // key.shape[2]
    memory = state.copy()  # [batch, kv heads, keys, values]
    result = np.zeros((batch, steps, heads, value.shape[3]), query.dtype)
    for t in range(steps):
        k, v = key[:, t], value[:, t]
        if "decay" in extra:
            memory = memory * extra["decay"][:, t][..., None]
        if "beta" in extra:
            v = extra["beta"][:, t] * (v - np.einsum("bhkv,bhk->bhv", memory, k))
        memory = memory + k[..., None] * v[:, :, None, :]
        wide = np.repeat(memory, group, axis=1)
        result[:, t] = np.einsum("bhkv,bhk->bhv", wide, query[:, t]) * np.asarray(
            scale, query.dtype)
    return result, memory


@primitive(family="attention", infer=_steps_type, reference=_steps_numpy, loops=True,
           differentiable=False)
def linear_attention_steps(query: Any, key: Any, value: Any, state: Any, *gates: Any,
                           given: tuple[str, ...], scale: float,
                           out: tuple[TensorType, TensorType]) -> Any:
    """the tokens of linear attention in turn, for tensors [batch, token, head, size]

    `given` names the gates: decay [batch, token, head, keys] and beta [batch, token, head, 1].
    The state is [batch, head, keys, values].
    """
    batch, steps, heads, keys = query.shape
    kv_heads, values = value.shape[2], value.shape[3]
    group = heads // kv_heads
    dtype: DType = query.dtype

    def build(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> Stmt:
        if 0 in (batch, kv_heads, keys, values):
            return Block(())
        q, k, v, old, *rest = inputs
        extra = dict(zip(given, rest, strict=True))
        answer, memory = outputs
        task, t, i, j = (fresh_axis("task", batch * kv_heads), fresh_axis("t", steps),
                         fresh_axis("i", keys), fresh_axis("j", values))
        h = fresh_axis("h", group)
        b, head = task.var // kv_heads, task.var % kv_heads
        token = (b * steps + t.var) * kv_heads + head
        first = task.var * keys * values
        cell = first + i.var * values + j.var
        fresh = Buffer("fresh", dtype, values)  # what is written for this token

        def each_value(stmt: Stmt) -> Stmt:
            return For(j.var, 0, values, stmt, "vector")

        def each_key(stmt: Stmt) -> Stmt:
            return For(i.var, 0, keys, stmt)

        load = For(i.var, 0, keys * values, Store(memory, first + i.var, old[first + i.var]),
                   "vector")
        stmts: list[Stmt] = []
        known: Scalar = v[token * values + j.var]
        if "decay" in extra:
            stmts.append(each_key(each_value(Store(
                memory, cell, memory[cell] * extra["decay"][token * keys + i.var]))))
        stmts.append(each_value(Store(fresh, j.var, known)))
        if "beta" in extra:
            stmts += [
                each_key(each_value(Store(fresh, j.var, -memory[cell] * k[token * keys + i.var],
                                          "add"))),
                each_value(Store(fresh, j.var, fresh[j.var] * extra["beta"][token]))]
        stmts.append(each_key(each_value(Store(
            memory, cell, memory[cell] + k[token * keys + i.var] * fresh[j.var]))))
        asked: Index = (b * steps + t.var) * heads + head * group + h.var
        place = asked * values + j.var
        stmts.append(For(h.var, 0, group, block(
            each_value(Store(answer, place, Const(dtype, 0.0))),
            each_key(each_value(Store(answer, place, memory[cell] * (
                q[asked * keys + i.var] * scale), "add"))))))
        return For(task.var, 0, task.hi, Alloc(fresh, block(
            load, For(t.var, 0, steps, block(*stmts)))), "parallel")

    return build


@operator(family="attention", differentiable=False)
def linear_attention(query: Any, key: Any, value: Any, past_state: Any = None, decay: Any = None,
                     beta: Any = None, *, q_num_heads: int, kv_num_heads: int,
                     update_rule: str = "gated_delta", scale: float = 0.0,
                     chunk_size: int = 64) -> Any:
    """answers [batch, tokens, heads * size] of linear attention, and its state after all tokens

    Inputs have their heads packed into the last axis; decay is a logarithm, one a head or one a
    key. `chunk_size` is a hint of ONNX's that changes nothing here.
    """
    if update_rule not in RULES:
        raise ArgumentError(f"linear_attention has no rule {update_rule!r}", where=user_location(),
                            hint="use " + ", ".join(RULES))
    gated, corrected = "gated" in update_rule, "delta" in update_rule
    if (decay is not None) != gated or (beta is not None) != corrected:
        raise ArgumentError(
            f"the rule {update_rule!r} takes {'a' if gated else 'no'} decay and "
            f"{'a' if corrected else 'no'} beta", where=user_location())
    if kv_num_heads < 1 or q_num_heads % kv_num_heads:
        raise ArgumentError(f"{q_num_heads} heads of queries cannot share {kv_num_heads} of keys",
                            where=user_location())
    if query.ndim != 3 or value.ndim != 3 or not isinstance(query.shape[2], int) or not isinstance(
            value.shape[2], int):
        raise ShapeError(f"linear_attention needs [batch, tokens, heads * size] with known last "
                         f"axes, not {dims_text(query.shape)} and {dims_text(value.shape)}",
                         where=user_location())
    batch, steps, packed = query.shape
    keys, values = packed // q_num_heads, value.shape[2] // kv_num_heads
    wide = query.dtype.compute

    def split(x: Any, heads: int, size: Index) -> Any:
        if not all_equal(x.shape, (batch, steps, heads * size)):
            raise ShapeError(f"{heads} heads of {size} do not fit {dims_text(x.shape)} beside "
                             f"queries {dims_text(query.shape)}", where=user_location())
        return reshape(astype(x, dtype=wide), shape=(batch, steps, heads, size))

    gates: dict[str, Any] = {}
    if decay is not None:
        one = ask("==", decay.shape[2], kv_num_heads)
        factors = exp(split(decay, kv_num_heads, 1 if one else keys))
        gates["decay"] = broadcast_to(factors, shape=(batch, steps, kv_num_heads, keys))
    if beta is not None:
        each = split(beta, beta.shape[2], 1)
        gates["beta"] = broadcast_to(each, shape=(batch, steps, kv_num_heads, 1))
    state_type = query.dtype if past_state is None else past_state.dtype
    shape = (batch, kv_num_heads, keys, values)
    if past_state is not None and not all_equal(past_state.shape, shape):
        raise ShapeError(f"linear_attention needs a state {dims_text(shape)}, not "
                         f"{dims_text(past_state.shape)}", where=user_location())
    state = full(shape=shape, value=0, dtype=wide) if past_state is None else astype(
        past_state, dtype=wide)
    answer, state = linear_attention_steps(
        split(query, q_num_heads, keys), split(key, kv_num_heads, keys),
        split(value, kv_num_heads, values), state, *gates.values(), given=tuple(gates),
        scale=float(scale) or 1 / math.sqrt(keys))
    answer = reshape(answer, shape=(batch, steps, q_num_heads * values))
    return astype(answer, dtype=query.dtype), astype(state, dtype=state_type)
