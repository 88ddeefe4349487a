"""The same kernels for other instruction sets: AVX2, AVX-512 and NEON, by their assembly."""

import re

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.chips.cpu.chip import Cpu
from terrazzo.chips.cpu.description import avx2_spec, host, neon_spec
from terrazzo.compiler.levels import level_text
from terrazzo.compiler.lowering import Lowering
from terrazzo.graph import evaluate
from terrazzo.graph.ir import TensorType
from terrazzo.graph.trace import trace
from terrazzo.knobs import knobs
from terrazzo.runtime.executable import Executable

KERNELS = {
    "gelu": (lambda x: tz.gelu(x, approximate="tanh"), [(64, 96)]),
    "softmax": (lambda x: tz.softmax(x), [(64, 96)]),
    "column sum": (lambda x: tz.sum(x, axis=0), [(64, 96)]),
    "product": (lambda x, w: tz.relu(x @ w), [(33, 40), (40, 50)]),
}


def graph_of(name, dtype=tz.float32):
    function, shapes = KERNELS[name]
    return trace(function, [TensorType(s, dtype) for s in shapes], name="kernel")[0]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [tz.float32, tz.bfloat16, tz.float16], ids=lambda d: d.short)
def test_neon(name, dtype):
    assembly = level_text(Lowering(graph_of(name, dtype), Cpu(neon_spec())), "asm")
    assert ".4s" in assembly, "no 128-bit vectors of floats"
    assert "ymm" not in assembly


@pytest.mark.parametrize("name", KERNELS)
def test_avx2_uses_256_bits_and_no_more(name):
    assembly = level_text(Lowering(graph_of(name), Cpu(avx2_spec())), "asm")
    assert "%ymm" in assembly
    assert "%zmm" not in assembly


@pytest.mark.parametrize("name", KERNELS)
def test_narrower_code_gives_the_same_values(name):
    chip = host()
    if chip.vector_bits <= 128 or not chip.llvm_triple.startswith("x86_64"):
        pytest.skip("needs an x86 CPU with AVX2")
    graph = graph_of(name)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(v.shape).astype("f") for v in graph.inputs]
    (wanted,) = evaluate.run(graph, arrays, wide=True)
    for bits in {128, 256, chip.vector_bits}:
        with knobs.override(vector_bits=bits):
            artifact = Lowering(graph, Cpu()).artifact()
        got = Executable(artifact)(*arrays)
        np.testing.assert_allclose(got, wanted, rtol=3e-5, atol=3e-6)


def test_f16_without_instructions_for_it():
    chip = host()
    if not chip.llvm_triple.startswith("x86_64"):
        pytest.skip("x86 alone lacks them, before AVX")
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    rng = np.random.default_rng(0)
    singles = (rng.standard_normal(1 << 16) * 10.0 ** rng.integers(-9, 6, 1 << 16)).astype("f")
    with knobs.override(vector_bits=128):
        widen = trace(lambda x: tz.astype(x, "float32"), [TensorType(every.shape, tz.float16)])[0]
        narrow = trace(lambda x: tz.astype(x, "float16"), [TensorType(every.shape, tz.float32)])[0]
        wide = Executable(Lowering(widen, Cpu()).artifact())(every)
        small = Executable(Lowering(narrow, Cpu()).artifact())(singles)
    np.testing.assert_array_equal(wide, every.astype(np.float32))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(small, singles.astype(np.float16))


@pytest.mark.parametrize("dtype", [tz.float32, tz.bfloat16, tz.int8], ids=lambda d: d.short)
def test_rows_of_a_table_are_copied_in_whole_vectors(dtype):
    """Whatever the type of the number of a row: it is one number for all lanes."""
    chip = avx2_spec()
    graph, _ = trace(lambda table, rows: tz.take(table, rows, axis=0),
                     [TensorType((100, 512), dtype), TensorType((9,), tz.int64)], name="kernel")
    code = level_text(Lowering(graph, Cpu(chip)), "llvm")
    assert f"load <{chip.lanes(dtype.bits)} x" in code


def test_large_tensors_of_bfloat_are_filled_in_whole_vectors():
    graph, _ = trace(lambda x, u, i: tz.index_update(tz.zeros_like(x), i, u, axis=0, reduce="add"),
                     [TensorType((32000, 512), tz.bfloat16), TensorType((9, 512), tz.bfloat16),
                      TensorType((9,), tz.int64)], name="kernel")
    assembly = level_text(Lowering(graph, Cpu(avx2_spec())), "asm")
    assert re.search(r"vmovnt\w+\s+%ymm", assembly), "past the caches, not lane by lane"
