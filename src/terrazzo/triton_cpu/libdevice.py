"""The functions of `triton.language.extra.libdevice` on the CPU.

Triton's own are stubs that a backend replaces. Each of ours is an external function of the table
`externals.FUNCTIONS`; f16 and bf16 are accepted wherever f32 is.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.language import core

from terrazzo.errors import UnsupportedOperator
from terrazzo.triton_cpu.frontend.externals import FUNCTIONS, symbol_of

_TYPES: dict[str, core.dtype] = {
    "h": tl.float16, "t": tl.bfloat16, "s": tl.float32, "d": tl.float64, "i": tl.int32,
    "u": tl.uint32, "l": tl.int64, "m": tl.uint64, "b": tl.int1,
}


def _function(name: str) -> Any:
    rows: dict[tuple[core.dtype, ...], tuple[str, core.dtype]] = {}
    for signature in FUNCTIONS[name]:
        takes, gives = signature.split(":")
        rows[tuple(_TYPES[c] for c in takes)] = symbol_of(name, signature), _TYPES[gives]
    known = " or ".join("(" + ", ".join(map(str, types)) + ")" for types in rows)

    def dispatch(args: list[Any], semantic: Any) -> Any:
        tensors = [semantic.to_tensor(a) for a in args]
        given = tuple(t.dtype for t in tensors)
        if given not in rows:
            raise UnsupportedOperator(
                f"libdevice.{name} does not take ({', '.join(map(str, given))})",
                hint=f"cast the arguments to {known}")
        return core.extern_elementwise("", "", tensors, rows, is_pure=True, _semantic=semantic)

    # Triton passes arguments by name, too, and looks for `_semantic` among the parameters.
    @core.extern
    def one(arg0: Any, _semantic: Any = None) -> Any:
        return dispatch([arg0], _semantic)

    @core.extern
    def two(arg0: Any, arg1: Any, _semantic: Any = None) -> Any:
        return dispatch([arg0, arg1], _semantic)

    @core.extern
    def three(arg0: Any, arg1: Any, arg2: Any, _semantic: Any = None) -> Any:
        return dispatch([arg0, arg1, arg2], _semantic)

    @core.extern
    def four(arg0: Any, arg1: Any, arg2: Any, arg3: Any, _semantic: Any = None) -> Any:
        return dispatch([arg0, arg1, arg2, arg3], _semantic)

    return (one, two, three, four)[len(next(iter(rows))) - 1]


def __getattr__(name: str) -> Any:
    raise AttributeError(f"libdevice.{name} does not exist on the CPU: the table of functions is "
                         "in terrazzo.triton_cpu.externals")


for _name in FUNCTIONS:
    globals()[_name] = _function(_name)
