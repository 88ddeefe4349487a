"""What Triton's backends for chips of ours share: their options, and what they tell Triton.

Whoever imports Triton imports its backends, dynamo for one. So what compiles (`stages.py`) and what
launches are imported when the first kernel asks for them.
"""

from __future__ import annotations

import hashlib
import sys
from abc import ABC
from dataclasses import dataclass, fields
from functools import cache
from types import ModuleType
from typing import Any, ClassVar

from triton import knobs as triton_knobs
from triton.backends import compiler as triton_compiler

from terrazzo.chips.cpu.description import host


@dataclass(frozen=True)
class Options:
    """What Triton's front end reads from a backend's options; most of it means nothing here."""

    num_warps: int = 4
    num_ctas: int = 1
    num_stages: int = 3
    warp_size: int = 1
    maxnreg: int | None = None
    ir_override: str | None = None
    enable_fp_fusion: bool = True
    launch_cooperative_grid: bool = False
    launch_pdl: bool = False
    supported_fp8_dtypes: tuple[str, ...] = (
        "fp8e5", "fp8e4nv", "fp8e4b8", "fp8e5b16", "fp8e4b15")
    deprecated_fp8_dot_operand_dtypes: tuple[str, ...] = ()
    default_dot_input_precision: str = "ieee"
    allowed_dot_input_precisions: tuple[str, ...] = ("ieee", "tf32", "tf32x3", "bf16x3", "bf16x6")
    max_num_imprecise_acc_default: int = 0
    extern_libs: tuple[Any, ...] = ()
    debug: bool = False
    backend_name: str = "cpu"
    sanitize_overflow: bool = False
    arch: str = ""
    instrumentation_mode: str = ""

    def __post_init__(self) -> None:
        if self.num_warps < 1 or self.num_warps & (self.num_warps - 1):  # as on GPUs
            raise AssertionError(f"num_warps must be a power of 2, not {self.num_warps}")

    def hash(self) -> str:
        text = "_".join(f"{k}-{v}" for k, v in sorted(self.__dict__.items()))
        return hashlib.sha256(text.encode()).hexdigest()


@cache
def _options_of_others() -> frozenset[str]:
    """The options of Triton's own backends: kernels tuned for GPUs may give them."""
    from triton.backends import backends

    names = {"fpsan_homomorphic_casts"}
    for backend in backends.values():
        module = sys.modules[backend.compiler.__module__]
        for item in vars(module).values():
            if isinstance(item, type) and item.__name__.endswith("Options"):
                names |= set(getattr(item, "__dataclass_fields__", {}))
    return frozenset(names)


def _fp_fusion(requested: bool | None) -> bool:
    """Whether products and sums may be fused: a launch's wish, and Triton's settings."""
    language = triton_knobs.language
    if getattr(language, "force_disable_fp_fusion", False):  # since 3.9
        return False
    return bool(language.default_fp_fusion if requested is None else requested)


class LoopBackend(triton_compiler.BaseBackend, ABC):
    """A backend whose kernels become Loop IR; what is left is a hash and the stages."""

    supports_native_tensor_specialization = True
    backend_name: ClassVar[str]

    @classmethod
    def supports_target(cls, target: Any) -> bool:
        return bool(target.backend == cls.backend_name)

    def parse_options(self, opts: dict[str, Any]) -> Options:
        own = {f.name for f in fields(Options)}
        given = {k: v for k, v in opts.items() if k in own and v is not None}
        given["enable_fp_fusion"] = _fp_fusion(given.get("enable_fp_fusion"))
        given.setdefault("sanitize_overflow", bool(given.get("debug")))  # it is made of asserts
        if isinstance(given.get("extern_libs"), dict):  # options are keys of a cache
            given["extern_libs"] = tuple(given["extern_libs"].items())
        options = Options(**{"arch": str(self.target.arch),
                             "backend_name": self.backend_name, **given})
        for name, value in opts.items():  # Triton refuses keywords that options do not have
            if name not in own and name in _options_of_others():
                options.__dict__[name] = value
        return options

    def pack_metadata(self, metadata: Any) -> tuple[Any, ...]:
        return (metadata.num_warps, metadata.num_ctas, metadata.shared)

    def get_codegen_implementation(self, options: Options) -> dict[str, Any]:
        from terrazzo.triton_cpu.frontend.conversions import convert_custom_types

        return {"min_dot_size": lambda lhs, rhs: (1, 1, 1),
                "convert_custom_types": convert_custom_types}

    def get_module_map(self) -> dict[str, ModuleType]:
        from terrazzo.triton_cpu import libdevice

        return {"triton.language.extra.libdevice": libdevice}

    def load_dialects(self, context: Any) -> None:
        """TTIR's own dialects are all there is."""


def host_key() -> str:
    """A text that is equal where the same code runs."""
    return host().fingerprint
