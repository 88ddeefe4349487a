"""What an operator with kernels of its own is cut into."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from terrazzo.codegen.triton.module import Written
from terrazzo.expr.ir import Program

Maker: TypeAlias = Callable[[bool], Written]  # of a kernel, by whether addresses have 64 bits
Part: TypeAlias = tuple[Program, Maker | None]  # without a maker: printed as any group is
Parts: TypeAlias = list[Part]  # in the order in which they run
