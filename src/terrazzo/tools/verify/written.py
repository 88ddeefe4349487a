"""Kernels by hand held against what their operator means, and to the memory that is theirs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from terrazzo.calls.arguments import Rebuild
from terrazzo.calls.kernels import Written, ready
from terrazzo.tools.verify import error_bounds
from terrazzo.tools.verify.comparison import Difference, compare
from terrazzo.tools.verify.levels import KERNEL, Notes, Subject, Wrong

FENCE = 256  # bytes before and after each result that nobody may write to
MARK = 0xA5


def check_written(written: Written, rebuild: Rebuild, subject: Subject,
                  arrays: Sequence[np.ndarray], notes: Notes) -> bool:
    """Whether a kernel is for such arrays and could be run; raises `Wrong` where it is wrong."""
    dense = [np.ascontiguousarray(a).reshape(a.shape) for a in arrays]
    memory = error_bounds.run(subject.primitive, dense)
    expected = [(memory[v], v.dtype) for v in subject.primitive.outputs]
    found = ready(written, rebuild, arrays, [(dtype, bounded.value.shape)
                                             for bounded, dtype in expected])
    if found is None:
        return False
    buffers = [np.full(2 * FENCE + int(np.prod(b.value.shape)) * dtype.itemsize, MARK, np.uint8)
               for b, dtype in expected]
    results = [buffer[FENCE:len(buffer) - FENCE].view(dtype.np).reshape(bounded.value.shape)
               for buffer, (bounded, dtype) in zip(buffers, expected, strict=True)]
    before = [a.copy() for a in arrays]
    found.into(arrays, results)
    for i, buffer in enumerate(buffers):
        edges = np.concatenate([buffer[:FENCE], buffer[len(buffer) - FENCE:]])
        if (edges != MARK).any():
            raise Wrong(KERNEL, f"{written.name}, which writes outside of result {i}",
                        Difference(index=(int(np.argmax(edges != MARK)),), expected=MARK,
                                   got=int(edges[edges != MARK][0])))
    for i, (a, b) in enumerate(zip(arrays, before, strict=True)):
        if a.tobytes() != b.tobytes():
            raise Wrong(KERNEL, f"{written.name}, which changes input {i}", Difference(index=()))
    for got, (bounded, dtype) in zip(results, expected, strict=True):
        difference = compare(got, bounded, dtype)
        notes.compared(KERNEL, difference)
        if difference.index is not None:
            raise Wrong(KERNEL, written.name, difference)
    return True


__all__ = ["check_written"]
