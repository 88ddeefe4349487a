"""Objects loaded without LLVM: the same results, protected memory, and no crash on damage."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import random
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.chips.cpu import elf
from terrazzo.chips.cpu.chip import Cpu
from terrazzo.chips.cpu.description import host, neon_spec
from terrazzo.chips.cpu.llvm import jit
from terrazzo.compiler.lowering import Lowering
from terrazzo.errors import ArtifactError, CodegenError
from terrazzo.graph.ir import TensorType
from terrazzo.graph.trace import trace
from terrazzo.runtime.artifact import Artifact
from terrazzo.runtime.executable import Executable

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not host().llvm_triple.startswith("x86_64"),
    reason="objects of other systems are linked by LLVM",
)


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


def integers(dtype: type, *shape: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 9, shape).astype(dtype)


def small_model(x: Any, kernel: Any, weight: Any, scale: Any) -> Any:
    y = tz.relu(tz.conv(x, kernel, padding=1))
    y = tz.max_pool(y, window=2, strides=2)
    y = tz.layer_norm(tz.reshape(y, (y.shape[0], -1)) @ weight, scale, scale)
    return tz.softmax(tz.gelu(y) * 3.0)


KERNELS: dict[str, tuple[Callable[..., Any], list[np.ndarray]]] = {
    "pointwise": (lambda x: tz.exp(tz.sin(x)) + tz.tanh(x), [floats(33, 70)]),
    "functions of libm": (lambda x: tz.lgamma(tz.abs(x)), [floats(70).astype(np.float64)]),
    "softmax": (lambda x: tz.softmax(x), [floats(33, 70)]),
    "norm": (lambda x, w: tz.rms_norm(x, w), [floats(33, 70), floats(70)]),
    "sum of columns": (lambda x: tz.sum(x, axis=0), [floats(300, 70)]),
    "product": (lambda x, w: tz.relu(x @ w), [floats(130, 96), floats(96, 150)]),
    "half product": (lambda x, w: x @ w, [floats(40, 96).astype(np.float16),
                                          floats(96, 50).astype(np.float16)]),
    "product of codes": (lambda x, w: tz.integer_matmul(x, w), [integers(np.uint8, 40, 96),
                                                                integers(np.int8, 96, 50)]),
    "convolution": (lambda x, w: tz.conv(x, w, padding=1), [floats(2, 16, 14, 14),
                                                            floats(24, 16, 3, 3)]),
    "by channels": (lambda x, w: tz.conv(x, w, padding=1, groups=16), [floats(2, 16, 14, 14),
                                                                       floats(16, 1, 3, 3)]),
    "attention": (lambda q: tz.scaled_dot_product_attention(q, q, q), [floats(1, 2, 70, 32)]),
    "transpose": (lambda x: tz.permute_dims(x, (1, 0)) + 0.0, [floats(130, 70)]),
    "sort": (lambda x: tz.sort(x), [floats(9, 70)]),
    "running sum": (lambda x: tz.cumsum(x, axis=0), [floats(70, 5)]),
    "gather": (lambda x, i: tz.take(x, i, axis=0), [floats(33, 70), integers(np.int64, 50)]),
    "recurrence": (lambda x, w, r: tz.lstm(x, w, r)[0], [floats(5, 2, 8), floats(1, 24, 8),
                                                         floats(1, 24, 6)]),
    "no elements": (lambda x: tz.relu(x) * 2.0, [floats(0, 70)]),
    "a whole model": (small_model, [floats(2, 3, 12, 12), floats(8, 3, 3, 3), floats(288, 10),
                                    floats(10)]),
}


def artifact_of(name: str) -> tuple[Artifact, list[np.ndarray]]:
    function, arrays = KERNELS[name]
    types = [TensorType(a.shape, tz.dtypes.as_dtype(a.dtype)) for a in arrays]
    return Lowering(trace(function, types, name="tested")[0], Cpu()).artifact(), arrays


def refuse(*_: Any) -> Any:
    raise elf.UnknownObject("not in this test")


@pytest.mark.parametrize("name", KERNELS)
def test_results_are_those_of_llvms_linker(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact, arrays = artifact_of(name)
    with monkeypatch.context() as patch:
        patch.setattr(elf, "load", refuse)
        theirs = Executable(artifact).run(arrays)
    monkeypatch.setattr(jit, "_link", refuse)
    ours = Executable(artifact).run(arrays)
    assert [a.tobytes() for a in ours] == [a.tobytes() for a in theirs]


EVERYTHING = """
@zeros = internal global [100 x i64] zeroinitializer, align 64
@counter = global i64 40, align 8
@table = internal constant [2 x ptr] [ptr @one, ptr @two]
@numbers = constant [2 x i64] [i64 5, i64 6]
@environ = external global ptr
declare double @cos(double)
declare ptr @memset(ptr, i32, i64)
define internal i64 @one() { ret i64 1 }
define internal i64 @two() { ret i64 2 }
define i64 @count() {
  %before = load i64, ptr @counter
  %after = add i64 %before, 1
  store i64 %after, ptr @counter
  ret i64 %after
}
define i64 @pick(i64 %i) {
  %at = getelementptr ptr, ptr @table, i64 %i
  %f = load ptr, ptr %at
  %r = call i64 %f()
  ret i64 %r
}
define double @cosine(double %x) {
  %y = call double @cos(double %x)
  %z = fadd double %y, 0.123456789
  ret double %z
}
define i64 @fill(i32 %byte) {
  %p = getelementptr i64, ptr @zeros, i64 99
  %before = load i64, ptr %p
  %q = call ptr @memset(ptr @zeros, i32 %byte, i64 800)
  %after = load i64, ptr %p
  %sum = add i64 %before, %after
  ret i64 %sum
}
define ptr @environment() {
  %e = load ptr, ptr @environ
  ret ptr %e
}
define i64 @choose(i64 %i) {
  switch i64 %i, label %other [ i64 0, label %a  i64 1, label %b  i64 2, label %c
                                i64 3, label %d  i64 4, label %e ]
a: ret i64 17
b: ret i64 -5
c: ret i64 90
d: ret i64 4
e: ret i64 33
other: ret i64 0
}
"""
EXPORTS = ("count", "pick", "cosine", "fill", "environment", "choose", "counter", "numbers")
i64 = ctypes.c_int64


@pytest.fixture(scope="module")
def everything() -> bytes:
    return jit.compile_object(EVERYTHING, host())


def test_code_constants_variables_and_the_process(everything: bytes) -> None:
    code, at = elf.load(everything, {}, EXPORTS)
    assert list(at) == list(EXPORTS) and min(at.values()) >= code.address
    count = ctypes.CFUNCTYPE(i64)(at["count"])
    fill = ctypes.CFUNCTYPE(i64, ctypes.c_int)(at["fill"])
    assert [count(), count(), i64.from_address(at["counter"]).value] == [41, 42, 42]
    assert fill(1) == 0x0101010101010101, "what has no contents starts as zeros"
    pick, choose = (ctypes.CFUNCTYPE(i64, i64)(at[name]) for name in ("pick", "choose"))
    assert [pick(0), pick(1)] == [1, 2]
    assert [choose(n) for n in range(6)] == [17, -5, 90, 4, 33, 0]
    assert ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double)(at["cosine"])(0.0) == 1.123456789
    environment = ctypes.CFUNCTYPE(ctypes.c_void_p)(at["environment"])()
    assert environment == ctypes.c_void_p.in_dll(ctypes.CDLL(None), "environ").value


def test_given_symbols_go_first() -> None:
    text = "declare i32 @getpagesize()\n"
    text += "define i32 @f() {\n  %a = call i32 @getpagesize()\n  ret i32 %a\n}"
    mine = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: -4)
    given = {"getpagesize": ctypes.cast(mine, ctypes.c_void_p).value or 0}
    for symbols, wanted in (({}, mmap.PAGESIZE), (given, -4)):
        code, at = elf.load(jit.compile_object(text, host()), symbols, ["f"])
        assert ctypes.CFUNCTYPE(ctypes.c_int)(at["f"])() == wanted, code


def mappings() -> list[tuple[int, int, str]]:
    with open("/proc/self/maps") as file:
        rows = [line.split(maxsplit=2)[:2] for line in file]
    ranges = [[int(part, 16) for part in places.split("-")] for places, _ in rows]
    return [(start, end, kind) for (start, end), (_, kind) in zip(ranges, rows, strict=True)]


def protection_at(address: int) -> str | None:
    return next((kind for start, end, kind in mappings() if start <= address < end), None)


def test_nothing_can_be_written_and_executed(everything: bytes) -> None:
    code, at = elf.load(everything, {}, EXPORTS)
    assert protection_at(code.address) == protection_at(at["count"]) == "r-xp"
    assert protection_at(at["numbers"]) == "r--p"
    assert protection_at(at["counter"]) == "rw-p"


def test_memory_is_given_back() -> None:
    text = "@large = internal global [3000000 x i8] zeroinitializer\n"
    text += "define ptr @f() {\n  ret ptr @large\n}"
    obj = jit.compile_object(text, host())

    def address_space() -> int:
        return sum(end - start for start, end, _ in mappings())

    kept = [elf.load(obj, {}, ["f"]) for _ in range(10)]
    full = address_space()
    kept.clear()
    gc.collect()
    assert full - address_space() >= 30_000_000


@pytest.mark.parametrize(("text", "reason"), [
    ("@x = thread_local global i64 0\ndefine ptr @f() {\n  ret ptr @x\n}", "section of type"),
    ("@x = common global i64 0\ndefine ptr @f() {\n  ret ptr @x\n}", "common"),
    ("declare void @tz_nowhere()\ndefine void @f() {\n  call void @tz_nowhere()\n  ret void\n}",
     "nobody defines tz_nowhere"),
    ("define void @g() {\n  ret void\n}", "does not define f"),
])
def test_what_it_does_not_know(text: str, reason: str) -> None:
    with pytest.raises(elf.UnknownObject, match=reason):
        elf.load(jit.compile_object(text, host()), {}, ["f"])


def test_objects_of_other_machines_are_unknown() -> None:
    with pytest.raises(elf.UnknownObject, match="machine 183"):
        elf.load(jit.compile_object("define void @f() {\n  ret void\n}", neon_spec()), {}, ["f"])
    with pytest.raises(elf.UnknownObject, match="no 64-bit"):
        elf.load(b"something else", {}, [])


def test_llvm_links_what_is_unknown(caplog: pytest.LogCaptureFixture) -> None:
    text = "@x = common global i64 0\ndefine i64 @f() {\n  %v = load i64, ptr @x\n  ret i64 %v\n}"
    with caplog.at_level(logging.DEBUG, "terrazzo"):
        library = jit.load_object(jit.compile_object(text, host()), exports=["f"])
    assert ctypes.CFUNCTYPE(i64)(library.address("f"))() == 0
    assert "LLVM links f: it has common symbols" in caplog.text


# ------------------------------------------------------------------------ damage
def section_table(obj: bytes) -> list[tuple[int, list[int]]]:
    (at,), (count,) = struct.unpack_from("<Q", obj, 40), struct.unpack_from("<H", obj, 60)
    places = [at + 64 * number for number in range(count)]
    return [(place, list(struct.unpack_from("<IIQQQQIIQQ", obj, place))) for place in places]


def changed(obj: bytes, kind: int, field: int, value: int) -> bytes:
    """The object with one field of its first section of a kind replaced."""
    place, fields = next(row for row in section_table(obj) if row[1][1] == kind)
    fields[field] = value
    return obj[:place] + struct.pack("<IIQQQQIIQQ", *fields) + obj[place + 64 :]


def within(obj: bytes, kind: int, offset: int, content: bytes) -> bytes:
    """The object with some bytes of its first section of a kind replaced."""
    _, fields = next(row for row in section_table(obj) if row[1][1] == kind)
    at = fields[4] + offset
    return obj[:at] + content + obj[at + len(content) :]


CODE, SYMBOLS, RELOCATIONS = 1, 2, 4
ALIGNMENT, OFFSET, SIZE, LINK = 8, 4, 5, 6
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "half of it": lambda o: o[: len(o) // 2],
    "the header alone": lambda o: o[:64],
    "half a header": lambda o: o[:30],
    "sections elsewhere": lambda o: o[:40] + struct.pack("<Q", 1 << 60) + o[48:],
    "code outside": lambda o: changed(o, CODE, OFFSET, len(o)),
    "code of huge size": lambda o: changed(o, CODE, SIZE, (1 << 64) - 1),
    "code of odd alignment": lambda o: changed(o, CODE, ALIGNMENT, 3),
    "huge alignment": lambda o: changed(o, CODE, ALIGNMENT, 1 << 40),
    "huge variables": lambda o: changed(o, 8, SIZE, 1 << 50),
    "symbols outside": lambda o: changed(o, SYMBOLS, OFFSET, (1 << 64) - 8),
    "half a symbol": lambda o: changed(o, SYMBOLS, SIZE, 36),
    "no names": lambda o: changed(o, SYMBOLS, LINK, 0),
    "names nowhere": lambda o: changed(o, SYMBOLS, LINK, 999),
    "a name outside": lambda o: within(o, SYMBOLS, 24, b"\xff\xff\xff\x7f"),
    "a symbol in no section": lambda o: within(o, SYMBOLS, 24 + 6, b"\xff\x20"),
    "half a relocation": lambda o: changed(o, RELOCATIONS, SIZE, 25),
    "relocations outside": lambda o: changed(o, RELOCATIONS, OFFSET, len(o) - 3),
    "a relocation outside its section": lambda o: within(o, RELOCATIONS, 0, b"\xff" * 8),
    "a relocation across its end": lambda o: within(
        o, RELOCATIONS, 0, struct.pack("<Q", section_table(o)[2][1][SIZE] - 3)),
    "a relocation to no symbol": lambda o: within(o, RELOCATIONS, 12, b"\xff\xff\0\0"),
    "a relocation that reaches too far": lambda o: within(
        o, RELOCATIONS, 16, struct.pack("<q", 1 << 40)),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_reported(name: str, everything: bytes) -> None:
    damaged = DAMAGE[name](everything)
    assert damaged != everything
    with pytest.raises(ArtifactError):
        elf.load(damaged, {}, EXPORTS)


def test_an_object_cut_anywhere_is_refused(everything: bytes) -> None:
    for length in range(len(everything) - 1):
        with pytest.raises((ArtifactError, elf.UnknownObject)):
            elf.load(everything[:length], {}, EXPORTS)


def test_random_damage_never_crashes(everything: bytes) -> None:
    outcomes = {"loaded": 0, "refused": 0}
    generator = random.Random(5)
    for _ in range(4000):
        damaged = bytearray(everything)
        for _ in range(generator.choice((1, 1, 2, 8))):
            damaged[generator.randrange(len(damaged))] = generator.choice(
                (0, 1, 0x7F, 0x80, 0xFF, generator.randrange(256)))
        try:
            elf.load(bytes(damaged), {}, EXPORTS)
            outcomes["loaded"] += 1
        except (ArtifactError, elf.UnknownObject):
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 100, outcomes


def test_damaged_code_of_an_executable_is_an_error_of_the_artifact() -> None:
    artifact, _ = artifact_of("pointwise")
    with pytest.raises(ArtifactError):
        Executable(replace(artifact, made=replace(
            artifact.made, code=artifact.made.code[:100])))
    with pytest.raises(CodegenError):
        Executable(replace(artifact, made=replace(
            artifact.made, code=b"nothing of the kind")))
