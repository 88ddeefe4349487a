"""x.at[key].set(y): a traced value with elements replaced, as values themselves never change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from terrazzo.base.shapes import broadcast_shapes, dims_text, num_elements
from terrazzo.errors import ArgumentError, user_location
from terrazzo.graph.applying import as_value
from terrazzo.graph.ir import OPERATORS, Value
from terrazzo.ops.creation import arange
from terrazzo.ops.elementwise import astype, where
from terrazzo.ops.getitem import getitem
from terrazzo.ops.indexing import scatter
from terrazzo.ops.shape import broadcast_to, reshape


@dataclass(frozen=True, eq=False)
class At:
    """`x.at`, which takes a subscript as x does."""

    value: Value

    def __getitem__(self, key: Any) -> Place:
        return Place(self.value, key)


@dataclass(frozen=True, eq=False)
class Place:
    """`x.at[key]`: x with something done at the elements x[key]; of several in order."""

    value: Value
    key: Any

    def get(self) -> Value:
        """x[key]"""
        return getitem(self.value, key=self.key)

    def set(self, updates: Any) -> Value:
        """x with x[key] = updates"""
        return self._updated(updates, "set", lambda old, new: new)

    def add(self, updates: Any) -> Value:
        """x with updates added at key: of an index that is given twice, both"""
        return self._updated(updates, "add", OPERATORS["add"])

    def subtract(self, updates: Any) -> Value:
        """x with updates subtracted at key"""
        return self.add(-as_value(updates, self.value.dtype))

    def mul(self, updates: Any) -> Value:
        """x multiplied by updates at key"""
        return self._updated(updates, "mul", OPERATORS["multiply"])

    multiply = mul

    def min(self, updates: Any) -> Value:
        """x with the smaller of x and updates at key"""
        return self._updated(updates, "min", OPERATORS["minimum"])

    def max(self, updates: Any) -> Value:
        """x with the larger of x and updates at key"""
        return self._updated(updates, "max", OPERATORS["maximum"])

    def _updated(self, updates: Any, how: str, choose: Callable[[Any, Any], Any]) -> Value:
        x = self.value
        new = astype(as_value(updates, None if hasattr(updates, "dtype") else x.dtype),
                     dtype=x.dtype)
        if _is_mask(self.key):
            return self._where(as_value(self.key), new, choose)
        # Where the elements of x[key] lie, by asking a tensor of places for the same key.
        places = getitem(reshape(arange(start=num_elements(x.type.shape)), shape=x.type.shape),
                         key=self.key)
        flat = scatter(reshape(x, shape=(-1,)), reshape(places, shape=(-1,)),
                       reshape(broadcast_to(new, shape=places.type.shape), shape=(-1,)),
                       axis=0, reduce=how)
        return reshape(flat, shape=x.type.shape)

    def _where(self, mask: Value, new: Value, choose: Callable[[Any, Any], Any]) -> Value:
        """By a mask, whose number of elements is not known: the updates must fit each of them."""
        x = self.value
        rest = x.type.shape[mask.ndim:]
        if mask.ndim > x.ndim or new.ndim > len(rest):
            raise ArgumentError(
                f"x.at[mask] of {dims_text(x.type.shape)} and a mask of "
                f"{dims_text(mask.type.shape)} is given updates of {dims_text(new.type.shape)}",
                where=user_location(), hint="give one number, or what fits every element that the "
                "mask chooses; tz.where takes one for each")
        broadcast_shapes(mask.type.shape, x.type.shape[:mask.ndim])
        chosen = reshape(mask, shape=(*mask.type.shape, *(1 for _ in rest)))
        return where(chosen, choose(x, new), x)


def _is_mask(key: Any) -> bool:
    return (isinstance(key, Value) and key.dtype.is_bool) or (
        isinstance(key, np.ndarray) and key.dtype == bool)
