"""Fourier transforms, windows and mel filters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from terrazzo.dtypes import float32
from terrazzo.frontends.onnx.registry import Call, Result, converts
from terrazzo.ops import signal

_WINDOWS: dict[str, Callable[..., Any]] = {
    "HannWindow": signal.hann_window,
    "HammingWindow": signal.hamming_window,
    "BlackmanWindow": signal.blackman_window,
}


@converts(*_WINDOWS)
def window(call: Call) -> Result:
    return _WINDOWS[call.node.op_type](
        size=int(call.number(0)), periodic=bool(call.attr("periodic", 1)),
        dtype=call.dtype("output_datatype", float32))


@converts("DFT")
def dft(call: Call) -> Result:
    if call.version < 20:
        axis = call.attr("axis", 1)
    else:
        axis = int(call.number(2)) if call.has(2) else -2
    return signal.dft(call.value(0), axis=axis,
                      length=call.sizes(1)[0] if call.has(1) else None,
                      inverse=bool(call.attr("inverse", 0)),
                      onesided=bool(call.attr("onesided", 0)))


@converts("STFT")
def stft(call: Call) -> Result:
    return signal.stft(call.value(0), call.optional(2), frame_step=int(call.number(1)),
                       frame_length=int(call.number(3)) if call.has(3) else None,
                       onesided=bool(call.attr("onesided", 1)))


@converts("MelWeightMatrix")
def mel_weight_matrix(call: Call) -> Result:
    return signal.mel_weight_matrix(
        num_mel_bins=int(call.number(0)), dft_length=int(call.number(1)),
        sample_rate=call.number(2), lower_edge_hertz=call.number(3),
        upper_edge_hertz=call.number(4), dtype=call.dtype("output_datatype", float32))
