"""Execution providers: who runs a model, by onnxruntime's names, and what it is told."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from terrazzo.chips.chip import Chip
from terrazzo.chips.registry import chip_named
from terrazzo.errors import ArgumentError
from terrazzo.knobs import knobs

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
REFERENCE = "ReferenceExecutionProvider"
_GPU = "cuda"  # the chip that CUDA stands for
_TRUE = ("1", "true", "True")

# What onnxruntime's provider takes. Those with a value say what it is here without being told; the
# others steer what terrazzo does not have (cuDNN's searches, arenas of its own) and do nothing.
_OPTIONS: dict[str, str | None] = {
    "device_id": "0", "enable_cuda_graph": "0", "user_compute_stream": "0",
    **dict.fromkeys((
        "has_user_compute_stream", "gpu_mem_limit", "arena_extend_strategy",
        "cudnn_conv_algo_search", "cudnn_conv_use_max_workspace", "cudnn_conv1d_pad_to_nc1d",
        "do_copy_in_default_stream", "gpu_external_alloc", "gpu_external_free",
        "gpu_external_empty_cache", "tunable_op_enable", "tunable_op_tuning_enable",
        "tunable_op_max_tuning_duration_ms", "enable_skip_layer_norm_strict_mode", "prefer_nhwc",
        "use_ep_level_unified_stream", "use_tf32", "sdpa_kernel", "fuse_conv_bias")),
}


@dataclass(frozen=True)
class Wanted:
    """The providers of a session, the first one first, and their options."""

    names: tuple[str, ...]
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def chip(self) -> str:
        """The chip that code is compiled for; empty: the setting's."""
        return _GPU if CUDA in self.names[:self.names.index(CPU)] else ""

    @property
    def records(self) -> bool:
        """Whether launches are recorded once and repeated as one (CUDA graphs)."""
        return self.option("enable_cuda_graph") in _TRUE

    @property
    def stream(self) -> int:
        """The address of the stream that runs are queued in; 0: torch's current one."""
        return int(self.option("user_compute_stream"))

    def option(self, name: str) -> str:
        """An option of the GPU's."""
        return self.options.get(CUDA, {}).get(name) or _OPTIONS[name] or ""

    def answered(self) -> dict[str, dict[str, str]]:
        """What a session answers when it is asked for the options of its providers."""
        ours = {n: v for n, v in _OPTIONS.items() if v is not None}
        return {name: {**(ours if name == CUDA else {}), **self.options.get(name, {})}
                for name in self.names}


def gpu() -> Chip:
    """The chip behind the provider of GPUs, here or simulated."""
    return chip_named(_GPU).under(knobs.now)


def available() -> tuple[str, ...]:
    """The providers that can run something here."""
    return (CPU, REFERENCE) if gpu().absence else (CUDA, CPU, REFERENCE)


def wanted(given: Sequence[Any] | None, options: Sequence[Mapping[str, Any]] | None) -> Wanted:
    """Providers as a session is given them; None: the CPU and what it leaves to the reference.

    Of those that are not here a warning tells, and the CPU takes over.
    """
    check_options(given, options)
    if given is None:
        return Wanted((CPU, REFERENCE))
    pairs = [_pair(p) for p in given]
    if options:
        pairs = [_pair((name, told)) for (name, _), told in zip(pairs, options, strict=True)]
    asked = any(name not in (CPU, REFERENCE) for name, _ in pairs)
    here = available() if asked else (CPU, REFERENCE)
    for name, _ in pairs:
        if name not in here:
            why = f" ({gpu().absence})" if name == CUDA else ""
            warnings.warn(f"Specified provider {name!r} is not in available provider names. "
                          f"Available providers: {', '.join(map(repr, here))}{why}", stacklevel=4)
    known = {name: {k: str(v) for k, v in told.items()} for name, told in reversed(pairs)
             if name in here}
    check_gpu_options(known.get(CUDA, {}))
    names = tuple(dict.fromkeys(name for name, _ in pairs if name in here))
    return Wanted(names if CPU in names else (*names, CPU), known)


def _pair(given: Any) -> tuple[str, Mapping[str, Any]]:
    """A provider's name and options, of a name alone or both."""
    match given:
        case str():
            return given, {}
        case (str() as name, Mapping() as told):
            return name, told
    raise ArgumentError(f"{given!r} is no provider",
                        hint=f'give names, or pairs of a name and options: ("{CPU}", {{}})')


def check_options(providers: Sequence[Any] | None, options: Sequence[Mapping[str, Any]] | None
                  ) -> None:
    """Options come one for each provider, in one place."""
    if not options:
        return
    if len(options) != len(providers or ()):
        raise ArgumentError(f"{len(options)} provider_options for {len(providers or ())} providers")
    if any(not isinstance(p, str) for p in providers or ()):
        raise ArgumentError("options of providers stand beside their names, or in "
                            "provider_options, not both")


def check_gpu_options(told: Mapping[str, str]) -> None:
    """Refuse options that nobody knows, and a GPU that is not the one of this process."""
    for name in told:
        if name not in _OPTIONS:
            raise ArgumentError(f"{CUDA} has no option {name!r}",
                                hint=f"it has {', '.join(_OPTIONS)}")
    if told.get("device_id", "0") != "0":
        raise ArgumentError(f"{CUDA} runs on GPU 0, not on {told['device_id']}",
                            hint="choose the GPU of the process with CUDA_VISIBLE_DEVICES")
    if not told.get("user_compute_stream", "0").isdigit():
        raise ArgumentError(f"{told['user_compute_stream']!r} is no address of a stream")
