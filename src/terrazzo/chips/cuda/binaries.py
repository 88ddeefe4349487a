"""Triton kernels as machine code: Triton's compiler is handed a kernel, a GPU and its sizes.

No GPU is needed for that, nor its driver.
"""

from __future__ import annotations

import hashlib
import linecache
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from terrazzo.chips.spec import ChipSpec
from terrazzo.codegen.triton.module import Written
from terrazzo.dtypes import DType
from terrazzo.errors import CompileError, DeviceError, MissingDependency

_TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64",
          "float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5", "bool": "i1",
          **{f"int{n}": f"i{n}" for n in (8, 16, 32, 64)},
          **{f"uint{n}": f"u{n}" for n in (8, 16, 32, 64)}}


@dataclass(frozen=True)
class Binary:
    """Machine code of one kernel, and what a launch of it must know."""

    name: str
    cubin: bytes
    ptx: str
    shared: int  # bytes of shared memory
    warps: int
    extra: int  # pointers that Triton adds to the parameters: scratch, and what we leave empty
    scratch: int  # bytes of memory that each program has for its descriptors


def import_triton() -> Any:
    """Triton, or an error that says what it is needed for."""
    try:
        import triton
    except ImportError:
        raise MissingDependency("code for NVIDIA GPUs is made by the package triton",
                                hint="install it with: pip install triton") from None
    return triton


@lru_cache(maxsize=1024)
def jit_function(text: str, name: str) -> Any:
    """The kernel of a text as Triton's object; Triton reads its lines again by the file's name."""
    import_triton()
    file = f"<terrazzo {name} {hashlib.sha256(text.encode()).hexdigest()[:12]}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    scope: dict[str, Any] = {"__name__": file}
    exec(compile(text, file, "exec"), scope)
    return scope[name]


def _source_kind(kernel: Written) -> Any:
    """What Triton's compiler is handed a kernel as."""
    if not kernel.gluon:
        return import_triton().compiler.ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def arch_of(spec: ChipSpec) -> int:
    """The compute capability as one number: 90 for sm_90."""
    return next(int(f[3:]) for f in spec.features if f.startswith("sm_"))


def compiled(kernel: Written, types: Sequence[DType], constants: Mapping[str, int], warps: int,
             aligned: Sequence[bool], sixteen: bool, spec: ChipSpec) -> Binary:
    """Compile a kernel; `aligned` are the pointers that are multiples of 16."""
    triton = import_triton()
    from triton.backends.compiler import GPUTarget

    function = jit_function(kernel.jit_text(), kernel.name)
    size = "i64" if kernel.wide else "i32"
    signature = {**{p: f"*{_TYPES[t.name]}" for p, t in zip(kernel.pointers.values(), types,
                                                            strict=True)},
                 **dict.fromkeys(kernel.dims.values(), size),
                 **dict.fromkeys(constants, "constexpr")}
    order = function.arg_names
    multiples = [*aligned, *[sixteen] * len(kernel.dims)]
    source = _source_kind(kernel)(
        function, {n: signature[n] for n in order}, {(order.index(c),): v for c, v in
                                                     constants.items()},
        {(i,): [["tt.divisibility", 16]] for i, yes in enumerate(multiples) if yes})
    try:
        made = triton.compile(source, target=GPUTarget("cuda", arch_of(spec), 32),
                              options={"num_warps": warps, "enable_fp_fusion": True,
                                       **({"maxnreg": kernel.registers} if kernel.registers
                                          else {}),
                                       **({"num_stages": kernel.stages} if kernel.stages else {})})
    except Exception as error:
        raise CompileError(f"Triton could not compile {kernel.name} for {spec.name}: {error}",
                           hint=f"its source is that of lower(..., 'triton', chip='{spec.kind}')"
                           ) from error
    if made.metadata.shared > spec.l1_bytes:
        raise CompileError(f"{kernel.name} takes {made.metadata.shared} bytes of shared memory, "
                           f"and {spec.name} has {spec.l1_bytes}")
    ptx = made.asm["ptx"]
    head = ptx[ptx.index(".entry"):]
    parameters = head[:head.index(")")].count(".param")
    # Partitions of a kernel have warps of their own, which Triton counts.
    return Binary(made.metadata.name, made.asm["cubin"], ptx, made.metadata.shared,
                  made.metadata.num_warps,
                  parameters - len(kernel.pointers) - len(kernel.dims),
                  made.metadata.global_scratch_size)


def disassembled(binary: Binary) -> str:
    """The instructions of the GPU itself, by the tool that comes with Triton."""
    triton = import_triton()
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        raise DeviceError(f"there is no {tool}", hint="install a wheel of triton that has it")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.cubin)
        file.flush()
        done = subprocess.run([str(tool), "-sass", file.name], capture_output=True, text=True,
                              check=False)
    if done.returncode:
        raise DeviceError(f"cuobjdump failed: {done.stderr.strip()}")
    return done.stdout
