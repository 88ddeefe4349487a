"""The IR builder: what it folds, how it interleaves bundles, and that LLVM runs what it writes."""

from __future__ import annotations

import ctypes
import math
import re
import struct
import time
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from terrazzo.chips.cpu.description import host
from terrazzo.chips.cpu.llvm.builder import Builder, Module, Val, bundle, const, iota, vec
from terrazzo.chips.cpu.llvm.jit import compile_object, load_object

V8 = "<8 x float>"


def run(module: Module, *arrays: np.ndarray, sizes: tuple[int, ...] = ()) -> None:
    """Compiles the function 'f' of a module and calls it with the arrays' addresses."""
    library = load_object(compile_object(module.text(), host()), exports=["f"])
    types = [ctypes.c_void_p] * len(arrays) + [ctypes.c_int64] * len(sizes)
    native = ctypes.CFUNCTYPE(None, *types)(library.address("f"))
    native(*(array.ctypes.data for array in arrays), *sizes)


def function(*params: tuple[str, str]) -> Builder:
    return Builder(Module(), "f", params)


def body_of(b: Builder) -> list[str]:
    return [line.strip() for line in b.text().splitlines()[2:-1]]


def test_types_are_taken_apart() -> None:
    v = Val("<16 x float>", ("%a", "%b"))
    assert (v.lanes, v.elem, v.count) == (16, "float", 2)
    assert Val("i64", ("%a",)).lanes == 1
    assert vec("double", 1) == "double"
    assert [part.text for part in v.split()] == ["%a", "%b"]


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, 0.1, math.inf, -math.inf, 1e-45, 3e-8, 65504.0])
@pytest.mark.parametrize(
    ("elem", "dtype"),
    [("float", np.float32), ("double", np.float64), ("half", np.float16),
     ("bfloat", ml_dtypes.bfloat16)],
)  # fmt: skip
def test_float_literals_are_exact(elem: str, dtype: type, value: float) -> None:
    b = function(("ptr", "y"))
    b.store(const(elem, value), b.params[0], 1)
    b.ret()
    result = np.zeros(1, dtype)
    run(b.module, result)
    assert result.tobytes() == np.array([value], dtype).tobytes()


@pytest.mark.parametrize("elem", ["float", "double", "half", "bfloat"])
def test_nan_literals_are_quiet(elem: str) -> None:
    text = const(elem, math.nan).text
    digits = int(re.sub("0x[HR]?", "", text), 16)
    quiet = {"float": 1 << 51, "double": 1 << 51, "half": 1 << 9, "bfloat": 1 << 6}[elem]
    assert digits & quiet


def test_vector_literals_are_splats_and_zeros() -> None:
    assert const("<4 x i32>", 7).text == "splat (i32 7)"
    assert const("<4 x i32>", 0).text == "zeroinitializer"
    assert const("i32", 0xFFFFFFFF).text == "-1"
    assert const("i1", True).text == "true"
    assert iota("<3 x i32>").text == "<i32 0, i32 1, i32 2>"
    assert const("<4 x float>", 0.0) != const("<4 x float>", -0.0)


def test_scalar_index_arithmetic_is_folded() -> None:
    b = function(("i64", "n"))
    (n,) = b.params
    assert b.add(b.mul(3, 4), 5).literal == 17
    assert b.sdiv(-7, 2).literal == -3
    assert b.srem(-7, 2).literal == -1
    assert b.lshr(-1, 60).literal == 15
    assert b.add(n, 0) is n and b.mul(1, n) is n and b.sub(n, 0) is n
    assert b.mul(n, 0).literal == 0
    assert b.icmp("slt", 3, 4).literal == 1
    assert b.select(b.icmp("slt", 4, 3), n, b.const("i64", 1)).literal == 1
    assert b.smin(3, 4).literal == 3 and b.smax(3, 4).literal == 4
    assert body_of(b) == []


def test_division_by_zero_is_left_to_run_time() -> None:
    b = function()
    assert b.sdiv(1, 0).literal is None


def test_bundles_are_interleaved_part_by_part() -> None:
    b = function(("ptr", "x"))
    x = b.load(V8, bundle([b.params[0], b.gep("float", b.params[0], 8)]), 4)
    y = b.fma(x, x, 1.0)
    b.fadd(y, 2.0)
    operations = [re.sub(r"%t\d+ = ", "", line).split(" ")[0] for line in body_of(b)]
    assert operations == ["getelementptr", "load", "load", "call", "call", "fadd", "fadd"]


def test_mismatches_are_refused() -> None:
    b = function(("ptr", "x"), ("i64", "n"))
    pointer, n = b.params
    two, three = bundle([n] * 2), bundle([n] * 3)
    with pytest.raises(TypeError, match="different types"):
        b.add(n, b.const("i32", 1))
    with pytest.raises(ValueError, match="bundles of 2 and 3"):
        b.add(two, three)
    with pytest.raises(TypeError, match="one type"):
        bundle([n, pointer])
    with pytest.raises(TypeError, match="loop body"):
        b.loop(0, n, 1, lambda i, c: [], [n])
    with pytest.raises(ValueError, match="defined twice"):
        Builder(b.module, "f", [])


def test_loops_carry_bundles() -> None:
    b = function(("ptr", "x"), ("ptr", "y"), ("i64", "n"))
    x, y, n = b.params

    def body(i: Val, carried: list[Val]) -> list[Val]:
        parts = b.load(V8, bundle([b.gep("float", x, b.add(i, 8 * u)) for u in range(4)]), 4)
        return [b.fadd(carried[0], parts), b.add(carried[1], 1)]

    zero = bundle([b.const(V8, 0.0)] * 4)
    total, trips = b.loop(0, n, 32, body, [zero, b.const("i64", 0)])
    b.store(b.reduce("fadd", b.fold(b.fadd, total)), y, 4)
    b.store(b.cast("sitofp", trips, "float"), b.gep("float", y, 1), 4)
    b.ret()
    data = np.arange(320, dtype=np.float32)
    result = np.zeros(2, np.float32)
    run(b.module, data, result, sizes=(320,))
    assert result.tolist() == [data.sum(), 10]


def test_loops_of_known_length_leave_no_branches() -> None:
    b = function()
    seen: list[int | None] = []

    def body(i: Val, carried: list[Val]) -> None:
        seen.append(i.literal)

    b.loop(0, 0, 1, body)
    b.loop(5, 6, 4, body)
    assert seen == [5]
    assert body_of(b) == []


def test_instructions_without_effects_are_written_once_where_they_reach() -> None:
    b = function(("i64", "x"), ("i64", "n"), ("ptr", "p"))
    x, n, p = b.params
    assert b.mul(x, 3) == b.mul(x, 3)
    assert b.splat(x, 4) == b.splat(x, 4)
    assert b.load("i64", p, 8) != b.load("i64", p, 8)
    known = b.mul(x, 3)
    inside: list[Val] = []

    def turn(i: Val, _: list[Val]) -> None:
        assert b.mul(x, 3) == known
        inside.extend([b.mul(x, 5), b.mul(x, 5)])

    b.loop(0, n, 1, turn)
    assert inside[0] == inside[1] != b.mul(x, 5)
    either: list[Val] = []
    b.if_(b.icmp("slt", x, n), lambda: either.append(b.mul(x, 7)),
          lambda: either.append(b.mul(x, 7)))
    assert len({*either, b.mul(x, 7)}) == 3
    b.start_block("elsewhere")
    assert b.mul(x, 3) != known


def test_loops_that_run_test_at_their_end() -> None:
    module = Module()
    b = Builder(module, "f", [("ptr", "out"), ("i64", "n")])
    out, n = b.params
    known = b.loop(0, 10, 3, lambda i, s: [b.add(s[0], i)], [const("i64", 0)])
    assert len([line for line in body_of(b) if line.endswith(":")]) == 2  # the loop, and after it
    unknown = b.loop(0, n, 3, lambda i, s: [b.add(s[0], i)], [const("i64", 0)])
    b.store(known[0], out, 8)
    b.store(unknown[0], b.gep("i64", out, 1), 8)
    b.ret()
    for size in (0, 1, 3, 4, 10):
        found = np.full(2, -1, np.int64)
        run(module, found, sizes=(size,))
        assert found.tolist() == [18, sum(range(0, size, 3))]


def test_branches_choose_code_and_values() -> None:
    b = function(("ptr", "y"), ("i64", "n"))
    y, n = b.params
    small = b.icmp("slt", n, 10)
    (value,) = b.if_values(small, lambda: [b.mul(n, 2)], lambda: [b.sub(n, 10)])
    b.store(value, y, 8)
    b.if_(small, lambda: b.store(const("i64", 1), b.gep("i64", y, 1), 8))
    b.if_(b.icmp("eq", 1, 2), lambda: b.store(const("i64", 9), b.gep("i64", y, 1), 8))
    b.ret()
    for n_value, expected in [(3, [6, 1]), (13, [3, 0])]:
        result = np.zeros(2, np.int64)
        run(b.module, result, sizes=(n_value,))
        assert result.tolist() == expected


def test_masked_memory_and_gathers() -> None:
    b = function(("ptr", "x"), ("ptr", "y"), ("i64", "n"))
    x, y, n = b.params
    lanes = b.iota("<8 x i64>")
    mask = b.icmp("slt", lanes, b.splat(n, 8))
    v = b.masked_load(V8, x, mask, -1.0, 4)
    b.masked_store(b.fmul(v, 2.0), y, mask, 4)
    reverse = b.gep("float", x, b.sub(b.const("<8 x i64>", 7), lanes))
    b.masked_scatter(b.masked_gather(V8, reverse, mask, 0.0, 4), b.gep("float", y, b.add(lanes, 8)),
                     mask, 4)  # fmt: skip
    b.ret()
    data = np.arange(1, 9, dtype=np.float32)
    result = np.zeros(16, np.float32)
    run(b.module, data, result, sizes=(5,))
    assert result.tolist() == [2, 4, 6, 8, 10, 0, 0, 0, 8, 7, 6, 5, 4, 0, 0, 0]


def test_vector_shuffles_and_casts() -> None:
    b = function(("ptr", "x"), ("ptr", "y"))
    x, y = b.params
    v = b.load("<4 x float>", x, 4)
    swapped = b.shuffle(v, None, [3, 2, 1, 0])
    inserted = b.insert(swapped, b.extract(v, 1), 0)
    integers = b.cast("fptosi.sat", inserted, "i32")
    b.store(integers, y, 4)
    b.store(b.reduce("smax", integers), b.gep("i32", y, 4), 4)
    b.ret()
    result = np.zeros(5, np.int32)
    run(b.module, np.array([1, 2.9, 1e20, -4], np.float32), result)
    assert result.tolist() == [2, 2**31 - 1, 2, 1, 2**31 - 1]


def test_memory_atomics_calls_and_constants() -> None:
    module = Module()
    helper = Builder(module, "twice", [("double", "v")], ret="double", linkage="internal")
    helper.ret(helper.fmul(helper.params[0], 2.0))
    b = Builder(module, "f", [("ptr", "y")])
    (y,) = b.params
    # Asked for after other code, the stack memory is still reserved in the entry block.
    b.store(b.call("double", "twice", [b.call("double", "exp2", [const("double", 3.0)])]), y, 8)
    scratch = b.alloca("double", 4)
    b.memset(scratch, 0, 32)
    b.memcpy(b.gep("double", scratch, 1), module.table("double", [1.5, 2.5]), 16)
    b.memcpy(b.gep("double", y, 1), scratch, 32)
    counter = b.gep("double", y, 5)
    b.store(const("i64", 0), counter, 8, ordering="monotonic")
    b.fence()
    old = b.atomic_rmw("add", counter, const("i64", 5))
    b.compare_exchange(counter, b.add(old, 5), const("i64", 7))
    b.ret()
    result = np.full(6, np.nan)
    run(module, result)
    assert result[:5].tolist() == [16.0, 0.0, 1.5, 2.5, 0.0]
    assert result[5:].view(np.int64).tolist() == [7]
    assert module.text().index("alloca") < module.text().index("@exp2(double 0x")


def test_declarations_constants_and_metadata_are_shared() -> None:
    b = function(("ptr", "x"))
    (x,) = b.params
    v = b.load(V8, x, 32, nontemporal=True)
    for _ in range(2):
        v = b.fma(v, v, v)
        b.module.data(b"abc")
    b.store(v, x, 32, nontemporal=True)
    b.loop(0, 8, 1, lambda i, c: b.loop(0, 8, 1, lambda j, d: None) or None)
    b.ret()
    text = b.module.text()
    assert text.count("declare") == 1
    assert text.count("constant [3 x i8]") == 1
    assert text.count("!{i32 1}") == 1
    assert text.count("llvm.loop.unroll.disable") == 1
    storage = np.zeros(64, np.float32)
    run(b.module, storage[-storage.ctypes.data % 32 // 4 :])


def test_areas_that_never_overlap_are_marked() -> None:
    b = function(("ptr", "x"), ("ptr", "y"))
    first, second = b.module.alias_domain(2)
    b.store(b.load("float", b.params[0], 4, suffix=first), b.params[1], 4, suffix=second)
    b.ret()
    assert first != second and "!noalias" in first
    result = np.zeros(1, np.float32)
    run(b.module, np.ones(1, np.float32), result)
    assert result[0] == 1


def test_three_thousand_instructions_take_milliseconds() -> None:
    def build() -> float:
        b = function(("ptr", "x"))
        start = time.perf_counter()
        v = b.load("<16 x float>", b.params[0], 4)
        for _ in range(750):
            v = b.fma(v, v, 1.0)
            v = b.select(b.fcmp("ogt", v, 2.0), b.fadd(v, v), 0.5)
        b.module.text()
        return time.perf_counter() - start

    # The budget is 15 ms; ten times that leaves room for a busy machine.
    assert min(build() for _ in range(5)) < 0.150


@pytest.mark.parametrize(
    ("op", "expected"), [(lambda b, x: b.fneg(x), -1.5), (lambda b, x: b.sqrt(x), math.sqrt(1.5))]
)
def test_scalars_are_vectors_of_one_lane(
    op: Callable[[Builder, Val], Val], expected: float
) -> None:
    b = function(("ptr", "y"))
    v = b.load("float", b.params[0], 4)
    b.store(b.reduce("fadd", b.splat(op(b, v), 1)), b.params[0], 4)
    b.ret()
    data = np.array([1.5], np.float32)
    run(b.module, data)
    assert data[0] == struct.unpack("<f", struct.pack("<f", expected))[0]
