"""LLVM IR as text becomes code that can be called, or an error that shows the line."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
import time

import pytest

from terrazzo.chips import ChipSpec
from terrazzo.chips.cpu.description import avx2_spec, cpu_spec, host, neon_spec
from terrazzo.chips.cpu.llvm import jit
from terrazzo.chips.cpu.llvm.jit import OptLevel
from terrazzo.errors import CodegenError

i64 = ctypes.c_int64

SUM = """
define i64 @total(ptr %values, i64 %n) {
entry:
  %sum = alloca i64
  store i64 0, ptr %sum
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %i.next, %loop ]
  %at = getelementptr i64, ptr %values, i64 %i
  %value = load i64, ptr %at
  %old = load i64, ptr %sum
  %new = add i64 %old, %value
  store i64 %new, ptr %sum
  %i.next = add i64 %i, 1
  %more = icmp ult i64 %i.next, %n
  br i1 %more, label %loop, label %out
out:
  %result = load i64, ptr %sum
  ret i64 %result
}
"""

DOUBLE = """
define void @double(ptr %p) {
  %a = load <16 x float>, ptr %p, align 4
  %b = fadd <16 x float> %a, %a
  store <16 x float> %b, ptr %p, align 4
  ret void
}
"""


def constant(value: int) -> bytes:
    return jit.compile_object(f"define i64 @answer() {{\n  ret i64 {value}\n}}", host())


def avx512_chip(vector_bits: int) -> ChipSpec:
    names = ["sse2", "avx", "avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"]
    triple = "x86_64-unknown-linux-gnu"
    return cpu_spec("icelake-server", triple, names, vector_bits=vector_bits)


def call(library: jit.Library, name: str) -> int:
    return int(ctypes.CFUNCTYPE(i64)(library.address(name))())


@pytest.mark.parametrize("opt", ["none", "light", "full"])
def test_compile_load_and_call(opt: OptLevel) -> None:
    library = jit.load_object(jit.compile_object(SUM, host(), opt), exports=["total"])
    total = ctypes.CFUNCTYPE(i64, ctypes.c_void_p, i64)(library.address("total"))
    values = (i64 * 100)(*range(100))
    assert total(values, 100) == 4950


def test_light_optimisation_moves_locals_to_registers_and_inlines() -> None:
    text = SUM + "define internal i64 @one() alwaysinline {\n  ret i64 1\n}\n"
    text += "define i64 @two() {\n  %a = call i64 @one()\n  %b = add i64 %a, 1\n  ret i64 %b\n}\n"
    optimised = jit.optimized_ir(text, host())
    assert "alloca" in jit.optimized_ir(text, host(), "none")
    assert "alloca" not in optimised
    assert "call i64 @one" not in optimised


@pytest.mark.parametrize("opt", ["light", "full"])
def test_optimisation_is_the_same_every_time(opt: OptLevel) -> None:
    assert len({jit.optimized_ir(SUM, host(), opt) for _ in range(4)}) == 1
    assert "alloca" not in jit.optimized_ir(SUM, host(), opt)


def test_equal_names_in_two_libraries_do_not_clash() -> None:
    first = jit.load_object(constant(1), exports=["answer"])
    second = jit.load_object(constant(2), exports=["answer"])
    assert (call(first, "answer"), call(second, "answer")) == (1, 2)
    del first
    gc.collect()
    assert call(second, "answer") == 2


def test_given_symbols_and_those_of_the_process_are_found() -> None:
    given = jit.load_object(constant(40), exports=["answer"])
    text = """
    declare i64 @forty()
    declare i64 @labs(i64)
    declare double @cos(double)
    define i64 @sum() {
      %a = call i64 @forty()
      %b = call i64 @labs(i64 -1)
      %c = call double @cos(double 0.0)
      %d = fptosi double %c to i64
      %e = add i64 %a, %b
      %f = add i64 %e, %d
      ret i64 %f
    }"""
    code = jit.compile_object(text, host())
    library = jit.load_object(code, {"forty": given.address("answer")}, ["sum"])
    assert call(library, "sum") == 42
    assert dict(library.addresses) == {"sum": library.address("sum")}


def test_constants_are_loaded_with_the_code() -> None:
    numbers = ", ".join(f"i32 {n * n}" for n in range(100_000))
    text = f"""
    @squares = internal constant [100000 x i32] [{numbers}]
    define i64 @square(i64 %n) {{
      %at = getelementptr i32, ptr @squares, i64 %n
      %value = load i32, ptr %at
      %wide = zext i32 %value to i64
      ret i64 %wide
    }}"""
    library = jit.load_object(jit.compile_object(text, host()), exports=["square"])
    square = ctypes.CFUNCTYPE(i64, i64)(library.address("square"))
    assert [square(n) for n in (0, 7, 40_000)] == [0, 49, 1_600_000_000]


def test_an_unknown_symbol_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    text = "declare i64 @tz_no_such_thing()\ndefine i64 @f() {\n"
    text += "  %a = call i64 @tz_no_such_thing()\n  ret i64 %a\n}\n"
    with pytest.raises(CodegenError, match="tz_no_such_thing"):
        jit.load_object(jit.compile_object(text, host()), exports=["f"])
    assert capfd.readouterr().err == ""


def test_a_name_that_was_not_exported_is_reported() -> None:
    library = jit.load_object(constant(1), exports=["answer"])
    with pytest.raises(CodegenError, match="exports no 'question', only: answer"):
        library.address("question")


def test_a_damaged_object_is_reported() -> None:
    with pytest.raises(CodegenError, match="could not be loaded"):
        jit.load_object(b"not an object file", exports=["answer"])


def test_a_parse_error_shows_the_line_and_its_neighbours() -> None:
    bad = SUM.replace("%new = add i64 %old, %value", "%new = add i64 %old, %missing")
    with pytest.raises(CodegenError) as caught:
        jit.compile_object(bad, host())
    message = str(caught.value)
    assert "line 12: use of undefined value '%missing'" in message
    assert ">    12 |   %new = add i64 %old, %missing" in message
    assert "     11 |   %old = load i64, ptr %sum" in message


def test_a_verifier_error_shows_the_line() -> None:
    bad = """define i64 @f(i1 %c) {
entry:
  br i1 %c, label %left, label %right
left:
  %x = add i64 1, 2
  br label %right
right:
  ret i64 %x
}"""
    with pytest.raises(CodegenError, match="does not dominate all uses") as caught:
        jit.compile_object(bad, host())
    assert "line 5" in str(caught.value)


def test_an_unknown_triple_is_reported() -> None:
    odd = cpu_spec("z80", "z80-unknown-none", [])
    with pytest.raises(CodegenError, match="no target for the triple"):
        jit.compile_object(SUM, odd)


def test_vectors_are_as_wide_as_the_chip_says() -> None:
    text = {bits: jit.assembly(DOUBLE, avx512_chip(bits)) for bits in (128, 256, 512)}
    assert "zmm" in text[512]
    assert "zmm" not in text[256] and "ymm" in text[256]
    assert "ymm" not in text[128] and "xmm" in text[128]
    assert "ymm" in jit.assembly(DOUBLE, avx2_spec())
    assert "fadd\tv0.4s" in jit.assembly(DOUBLE, neon_spec())


def test_loops_are_vectorised_at_full_width_when_asked() -> None:
    assert "zmm" in jit.assembly(SUM, avx512_chip(512), "full")
    assert "zmm" not in jit.assembly(SUM, avx512_chip(256), "full")


def test_other_chips_get_objects_too() -> None:
    assert jit.compile_object(SUM, neon_spec())[18:20] == b"\xb7\x00"  # ELF machine: AArch64
    assert jit.compile_object(SUM, avx2_spec())[18:20] == b"\x3e\x00"  # ELF machine: x86-64


def test_many_threads_compile_and_load_at_once() -> None:
    results: dict[int, int] = {}

    def work(number: int) -> None:
        library = jit.load_object(constant(number), exports=["answer"])
        results[number] = call(library, "answer")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {number: number for number in range(24)}


def test_loading_is_quick() -> None:
    """The budget is 1 ms; the bound leaves room for a loaded machine."""
    code = jit.compile_object(SUM, host())
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        jit.load_object(code, exports=["total"])
        best = min(best, time.perf_counter() - start)
    assert best < 5e-3


def test_importing_does_not_load_llvm() -> None:
    program = (
        "import sys, terrazzo.chips.cpu.llvm.jit, terrazzo.chips.cpu\n"
        "assert not any(name.startswith('llvmlite') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
