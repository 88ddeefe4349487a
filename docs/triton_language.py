"""What of Triton's language the CPU backend takes: every public function, tried.

Each is a line of a kernel that is lowered to Loop IR. So the table in triton-cpu.md says what the
code does, not what somebody remembers. `x`, `y` are tiles of 16 floats, `i` of 16 integers, `m` is
a matrix of 16 x 16 floats; `p`, `n` and `out` are pointers. A line without `=` gives a value, which
is stored.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

FAMILIES: dict[str, dict[str, str]] = {
    "programs": {
        "program_id": "tl.program_id(0)", "num_programs": "tl.num_programs(2)",
        "swizzle2d": "tl.swizzle2d(size, 1, 4, 4, 2)[0]", "debug_barrier": "tl.debug_barrier() =",
    },
    "tiles": {
        "arange": "tl.arange(0, 16)", "zeros": "tl.zeros((16,), tl.float32)",
        "zeros_like": "tl.zeros_like(x)", "full": "tl.full((16,), 7, tl.float32)",
        "cast": "tl.cast(x, tl.bfloat16)", "to_tensor": "x + tl.to_tensor(1)",
        "cat": "tl.cat(x, y, can_reorder=True)", "join": "tl.join(x, y)",
        "split": "tl.split(tl.join(x, y))[0]", "interleave": "tl.interleave(x, y)",
        "expand_dims": "tl.expand_dims(x, 1)", "unsqueeze": "tl.unsqueeze(x, 0)",
        "squeeze": "tl.squeeze(x[None, :], 0)", "broadcast": "tl.broadcast(x[:, None], m)[0]",
        "broadcast_to": "tl.broadcast_to(x[:, None], 16, 16)", "reshape": "tl.reshape(m, (256,))",
        "view": "tl.view(m, (4, 64))", "ravel": "tl.ravel(m)", "permute": "tl.permute(m, (1, 0))",
        "trans": "tl.trans(m)", "flip": "tl.flip(x, 0)", "gather": "tl.gather(x, i, 0)",
        "where": "tl.where(x > 0, x, y)",
    },
    "memory": {
        "load": "tl.load(p + i)", "store": "tl.store(out + i, x) =",
        "make_block_ptr": "tl.load(tl.make_block_ptr(p, (size,), (1,), (0,), (16,), (0,)), "
                          "boundary_check=(0,))",
        "advance": "tl.load(tl.advance(tl.make_block_ptr(p, (16,), (1,), (0,), (4,), (0,)), (4,)))",
        "make_tensor_descriptor": "tl.make_tensor_descriptor(p, [16, 16], [16, 1], [4, 4])"
                                  ".load([0, 0])",
        "load_tensor_descriptor": "tl.load_tensor_descriptor(tl.make_tensor_descriptor("
                                  "p, [16, 16], [16, 1], [4, 4]), [0, 0])",
        "store_tensor_descriptor": "tl.store_tensor_descriptor(tl.make_tensor_descriptor("
                                   "out, [16, 16], [16, 1], [16, 16]), [0, 0], m) =",
    },
    "atomics": {
        **{f"atomic_{name}": f"tl.atomic_{name}(n + i, i)" for name in
           ("add", "and", "max", "min", "or", "xchg", "xor")},
        "atomic_cas": "tl.atomic_cas(n + i, i, i + 1)",
        "atomic_load": "tl.atomic_load(n, sem='acquire')",
        "atomic_store": "tl.atomic_store(n, 1, sem='release') =",
        "atomic_poll": "tl.atomic_poll(n, 1, sem='acquire')",
    },
    "arithmetic": {
        "add": "tl.add(x, y)", "sub": "tl.sub(x, y)", "mul": "tl.mul(x, y)",
        "fma": "tl.fma(x, y, x)", "fdiv": "tl.fdiv(x, y)", "div_rn": "tl.div_rn(x, y)",
        "cdiv": "tl.cdiv(i, 3)", "umulhi": "tl.umulhi(i, i)", "abs": "tl.abs(x)",
        "maximum": "tl.maximum(x, y)", "minimum": "tl.minimum(x, y)",
        "clamp": "tl.clamp(x, -1.0, 1.0)",
        **{name: f"tl.{name}(x)" for name in
           ("ceil", "cos", "erf", "exp", "exp2", "floor", "log", "log2", "rsqrt", "sigmoid", "sin",
            "sqrt", "sqrt_rn")},
        "softmax": "tl.softmax(x)",
    },
    "products": {
        "dot": "tl.dot(m, m)",
        "dot_scaled": "tl.dot_scaled(tl.zeros((16, 32), tl.float8e5), tl.zeros((16, 1), tl.uint8),"
                      " 'e5m2', tl.zeros((32, 16), tl.float8e5), None, 'e5m2')",
    },
    "reductions, scans, sorting": {
        "reduce": "tl.reduce(x, 0, pick)", "associative_scan": "tl.associative_scan(x, 0, pick)",
        **{name: f"tl.{name}(x, 0)" for name in
           ("argmax", "argmin", "max", "min", "sum", "cumsum", "cumprod")},
        "reduce_or": "tl.reduce_or(i, 0)", "xor_sum": "tl.xor_sum(i, 0)", "sort": "tl.sort(x)",
        "topk": "tl.topk(x, 4)", "bitonic_merge": "tl.bitonic_merge(x)",
        "histogram": "tl.histogram(i, 8)",
    },
    "random numbers": {
        **{name: f"tl.{name}(size, i)" for name in ("rand", "randint", "randn")},
        **{name: f"tl.{name}(size, i)[3]" for name in ("rand4x", "randint4x", "randn4x")},
        "philox": "tl.philox(size, i, i, i, i)[0]",
        "uint_to_uniform_float": "tl.uint_to_uniform_float(i)",
        "pair_uniform_to_normal": "tl.pair_uniform_to_normal(x, y)[0]",
    },
    "loops and hints": {
        "range": "for _ in tl.range(0, size, num_stages=2): tl.atomic_add(n, 1) =",
        "static_range": "for _ in tl.static_range(2): tl.atomic_add(n, 1) =",
        "condition": "while tl.condition(tl.load(n) > 0): tl.atomic_add(n, -1) =",
        "static_assert": "tl.static_assert(True) =", "static_print": "tl.static_print('') =",
        "assume": "tl.assume(size > 0) =", "multiple_of": "tl.multiple_of(i, 4)",
        "max_contiguous": "tl.max_contiguous(i, 4)", "max_constancy": "tl.max_constancy(i, 4)",
    },
    "debugging": {
        "device_print": "tl.device_print('x', x) =",
        "device_assert": "tl.device_assert(x > 0, 'negative') =",
    },
    "foreign code": {
        "map_elementwise": "tl.map_elementwise(pick, x, y)",
        "inline_asm_elementwise": "tl.inline_asm_elementwise('mov.b32 $0, $1;', '=r,r', [i], "
                                  "tl.int32, True, 1)",
    },
}
# Public names that are types, modules, or made for other names of the table.
NOT_FUNCTIONS = frozenset((
    "PropagateNan", "TRITON_MAX_TENSOR_NUMEL", "block_type", "const", "constexpr",
    "constexpr_type", "dtype", "extra", "math", "pi32_t", "pointer_type", "slice", "target_info",
    "tensor", "tensor_descriptor", "tuple", "void", "philox_impl", "expect_zero"))

HEAD = """\
import triton
import triton.language as tl


@triton.jit
def pick(a, b):
    return tl.maximum(a, b)
"""
KERNEL = """

@triton.jit
def use_{name}(p, n, out, size):
    at = tl.arange(0, 16)
    x, y, i = tl.load(p + at), tl.load(p + 16 + at), tl.load(n + at)
    m = tl.load(p + at[:, None] * 16 + at[None, :])
    {line}
"""


def kernels() -> dict[str, str]:
    """The source of a kernel for each function that this version of Triton has."""
    import triton.language as tl

    made = {}
    for family in FAMILIES.values():
        for name, code in family.items():
            if hasattr(tl, name):
                line = (code.removesuffix(" =") if code.endswith(" =") else
                        f"r = {code}\n    tl.store(out + 0 * r.to(tl.int32), r.to(tl.float32))")
                made[name] = KERNEL.format(name=name, line=line)
    return made


def types() -> list[str]:
    """The element types that a kernel may use."""
    import triton.language as tl

    from terrazzo.triton_cpu.backend import Options

    every = [(name, getattr(tl, name)) for name in sorted(tl.__all__)
             if isinstance(getattr(tl, name), tl.dtype) and name not in NOT_FUNCTIONS]
    return [name for name, dtype in every
            if not dtype.is_fp8() or dtype.name in Options().supported_fp8_dtypes]


def forgotten() -> list[str]:
    """Public functions of Triton's language that the table above does not try."""
    import triton.language as tl

    known = {name for family in FAMILIES.values() for name in family} | NOT_FUNCTIONS
    return [name for name in tl.__all__
            if name not in known and not isinstance(getattr(tl, name, None), tl.dtype)]


def tried() -> dict[str, str]:
    """Why each function is refused; the empty text where it is not."""
    sources = kernels()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "triton_language_kernels.py"
        path.write_text(HEAD + "".join(sources.values()))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        try:
            spec.loader.exec_module(module)
            # Deprecations are Triton's business, and static_print prints while compiling.
            with warnings.catch_warnings(action="ignore"), redirect_stdout(None):
                return {name: _refusal(getattr(module, f"use_{name}")) for name in sources}
        finally:
            del sys.modules[path.stem]


def _refusal(kernel: Any) -> str:
    """Lower a kernel to Loop IR; what stood in the way."""
    from triton._C.libtriton import ir
    from triton.compiler import ASTSource, CompilationError

    from terrazzo.errors import TerrazzoError
    from terrazzo.triton_cpu.compiler import CPUBackend
    from terrazzo.triton_cpu.driver import CPUDriver

    backend = CPUBackend(CPUDriver().get_current_target())
    options = backend.parse_options({})
    source = ASTSource(kernel, {"p": "*fp32", "n": "*i32", "out": "*fp32", "size": "i32"})
    context = ir.context()
    ir.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    metadata = dict(options.__dict__)
    try:
        module = source.make_ir(backend.target, options,
                                backend.get_codegen_implementation(options),
                                backend.get_module_map(), context)
        stages["loop"](stages["ttir"](module, metadata), metadata)
    except (TerrazzoError, CompilationError) as error:
        cause = error.__cause__ or error
        text = str(getattr(cause, "message", cause)).strip().splitlines()[-1]
        return text.replace(f" of kernel '{kernel.__name__}'", "")
    return ""
