"""Images and modules of the runtime library: what is loaded, and what is refused."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import numpy as np
import pytest
from runtime_kit import FUNCTIONS, Kit, object_code, words

from terrazzo.chips.cpu.description import host
from terrazzo.chips.cpu.llvm.jit import compile_object
from terrazzo.chips.gcu.image import (
    ImageFunction,
    checksum,
    plain_checksum,
    read_image,
    write_image,
)
from terrazzo.chips.gcu.library import (
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    SIGNATURES,
    FunctionInfo,
    check,
)
from terrazzo.errors import ArtifactError

HEADER = 64


def refused(kit: Kit, image: bytes) -> str:
    module = ctypes.c_void_p(1)
    said = kit.fails("gcuErrorInvalidImage",
                     kit.lib.gcuModuleLoadData(ctypes.byref(module), image, len(image)))
    assert module.value == 1
    return said


def sealed(image: bytes) -> bytes:
    """An image with the checksum and the size that its contents now have."""
    head = bytearray(image[:HEADER])
    struct.pack_into("<QQ", head, 16, len(image), checksum(image[HEADER:]))
    return bytes(head) + image[HEADER:]


# ---------------------------------------------------------------- images in Python
def test_images_are_read_as_they_were_written(kit: Kit) -> None:
    image = kit.image()
    assert len(image) == struct.unpack_from("<Q", image, 16)[0]
    again = read_image(image)
    assert again.object_code == object_code() and again.fingerprint == kit.fingerprint.encode()
    expected = [f if f.is_plan else ImageFunction(f.name, f.symbol, f.arguments, (f.name,),
                                                  scratchpad=f.scratchpad) for f in FUNCTIONS]
    assert list(again.functions) == expected


def test_checksums_agree(kit: Kit, rng: np.random.Generator) -> None:
    assert plain_checksum(b"") == 0xCBF29CE484222325
    assert plain_checksum(b"a") == 0xAF63DC4C8601EC8C  # of the list that FNV is published with
    for size in (0, 1, 7, 4000):
        data = rng.bytes(size)
        assert checksum(data) == plain_checksum(data)


@pytest.mark.parametrize("bad", [
    ImageFunction("a", "b", "pq"), ImageFunction("a", "b", "pc"), ImageFunction("a\0b", "b", "p"),
    ImageFunction("a", "b", "p", ("x", "y"))])
def test_what_no_image_can_say(bad: ImageFunction) -> None:
    with pytest.raises(ArtifactError):
        write_image(b"", [bad], "0" * 32)


def test_damaged_images_in_python(kit: Kit) -> None:
    image = kit.image(FUNCTIONS[0])
    with pytest.raises(ArtifactError):
        write_image(b"", [], "short")
    for at in range(0, len(image), 97):
        if 32 <= at < HEADER:  # the chip that it is for
            continue
        with pytest.raises(ArtifactError):
            read_image(image[:at] + bytes([image[at] ^ 1]) + image[at + 1:])
        with pytest.raises(ArtifactError):
            read_image(image[:at])


# ---------------------------------------------------------------- what is refused
def test_every_damaged_byte_is_noticed(kit: Kit) -> None:
    image = kit.image(FUNCTIONS[0], FUNCTIONS[-1])
    table = len(image) - len(object_code())
    places = [*range(table + 64), *range(table + 64, len(image), 31), len(image) - 1]
    for at in places:
        for bit in (1, 0x80):
            refused(kit, image[:at] + bytes([image[at] ^ bit]) + image[at + 1:])


def test_truncated_and_longer_images(kit: Kit) -> None:
    image = kit.image(FUNCTIONS[0])
    for size in [*range(200), *range(200, len(image), 37), len(image) - 1]:
        refused(kit, image[:size])
        if size >= HEADER:
            refused(kit, sealed(image[:size]))
    refused(kit, image + b"\0")
    refused(kit, sealed(image + b"\0"))


def test_damage_behind_a_right_checksum_never_crashes(kit: Kit, rng: np.random.Generator) -> None:
    """Every length and number of the table and of the object is checked by itself."""
    image = kit.image(FUNCTIONS[0])
    table = len(image) - len(object_code())
    loaded = tried = 0
    tables = len(image) - 64 * 20  # of sections, at the end of the object
    for at in [*range(HEADER, table + 64), *rng.integers(table, len(image), 800),
               *range(tables, len(image), 2)]:
        for value in (0xFF, 0x7F, image[at] ^ 1):
            tried += 1
            changed = sealed(image[:at] + bytes([value]) + image[at + 1:])
            module = ctypes.c_void_p()
            code = kit.lib.gcuModuleLoadData(ctypes.byref(module), changed, len(changed))
            if code == 0:  # another name, or other code: sound, as far as anybody can tell
                loaded += 1
                check(kit.lib.gcuModuleUnload(module))
            else:
                kit.fails("gcuErrorInvalidImage", code)
    assert 0 < loaded < tried - 500


def test_other_versions_and_chips_are_named(kit: Kit) -> None:
    image = bytearray(kit.image())
    struct.pack_into("<I", image, 8, 2)
    assert refused(kit, bytes(image)) == "an image of version 2, where this library reads 1"
    other = write_image(object_code(), FUNCTIONS, "x" * 32)
    assert refused(kit, other) == "an image for another chip than this gcu"
    assert "do not begin" in refused(kit, b"\x7fELF" + bytes(200))


def test_objects_that_cannot_be_loaded(kit: Kit) -> None:
    def image_of(text: str) -> bytes:
        return write_image(compile_object(text, host()), [ImageFunction("f", "f", "")],
                           kit.fingerprint)

    nobody = "declare void @nobody_has_this()\ndefine void @f() { call void @nobody_has_this() "\
             "ret void }"
    assert "needs nobody_has_this, which nobody has" in refused(kit, image_of(nobody))
    assert "defines no function f" in refused(kit, image_of("define void @g() { ret void }"))
    assert "defines no function f" in refused(kit, image_of("@f = global i64 1"))
    assert "cannot be loaded" in refused(kit, write_image(b"", [], kit.fingerprint))


# ---------------------------------------------------------------- modules
def test_llvm_text_to_a_running_kernel(kit: Kit) -> None:
    """x -> x * x of each program's element, with a constant, a call and a counter."""
    text = """
    @half = private constant double 0.5
    declare double @exp2(double)
    define void @squares(ptr %arguments, ptr %grid, i64 %threads, ptr %counters) {
    entry:
      %address = load i64, ptr %arguments
      %data = inttoptr i64 %address to ptr
      %n = load i64, ptr %grid
      br label %loop
    loop:
      %i = phi i64 [0, %entry], [%next, %loop]
      %at = getelementptr double, ptr %data, i64 %i
      %x = load double, ptr %at
      %half = load volatile double, ptr @half
      %root = call double @exp2(double %half)
      %xx = fmul double %x, %x
      %y = fmul double %xx, %root
      store double %y, ptr %at
      %slot = mul i64 %i, 8
      %counter = getelementptr i64, ptr %counters, i64 %slot
      store i64 17, ptr %counter
      %next = add i64 %i, 1
      %more = icmp slt i64 %next, %n
      br i1 %more, label %loop, label %end
    end:
      ret void
    }"""
    image = write_image(compile_object(text, host()), [ImageFunction("sq", "squares", "p")],
                        kit.fingerprint)
    module = kit.load(image)
    x = np.arange(40.0)
    address = kit.put(x)
    before = kit.cycles()
    check(kit.lib.gcuLaunchKernel(kit.function("sq", module), 40, 1, 1, words(address), 1, None))
    assert np.allclose(kit.get(address, np.float64, 40), x * x * 2 ** 0.5, rtol=1e-15)
    counted = np.zeros((40, 8), np.int64)
    counted[:, 0] = 17
    assert kit.cycles() - before >= kit.model(counted, 40) > 17
    check(kit.lib.gcuModuleUnload(module))
    check(kit.lib.gcuFree(address))


def test_functions_and_variables(kit: Kit) -> None:
    module = kit.load(kit.image())
    info = FunctionInfo()
    for function in FUNCTIONS:
        check(kit.lib.gcuFunctionGetInfo(info, kit.function(function.name, module)))
        assert info.arguments == len(function.arguments) and info.is_plan == function.is_plan
        assert info.calls == (len(function.calls) if function.is_plan else 1)
        assert info.scratchpad_bytes == function.scratchpad
    found = ctypes.c_void_p()
    said = kit.fails("gcuErrorNotFound", kit.lib.gcuModuleGetFunction(found, module, b"none"))
    assert said == "the module has no function none"
    for name in (b"none", b"mark", b"table"):
        kit.fails("gcuErrorNotFound", kit.lib.gcuModuleGetGlobal(found, module, name))
    variable = kit.made(kit.lib.gcuModuleGetGlobal, module, b"variable")
    slot, value = kit.zeros(1), np.array([99])
    check(kit.lib.gcuMemcpy(variable, value.ctypes.data, 8, HOST_TO_DEVICE))
    check(kit.lib.gcuLaunchKernel(kit.function("count_up", module), 1, 1, 1, words(slot), 1, None))
    assert kit.get(slot, np.int64) == 100 and kit.get(variable, np.int64) == 100
    check(kit.lib.gcuLaunchKernel(kit.function("mark", module), 1, 1, 1, words(variable), 1, None))
    assert kit.get(variable, np.int64) == 101
    back = np.zeros(1)
    kit.fails("gcuErrorInvalidPointer",
              kit.lib.gcuMemcpy(back.ctypes.data, variable, 1 << 20, DEVICE_TO_HOST))
    other = kit.load(kit.image())  # with variables of its own
    assert kit.get(kit.made(kit.lib.gcuModuleGetGlobal, other, b"variable"), np.int64) == 40
    for each in (module, other):
        check(kit.lib.gcuModuleUnload(each))
    check(kit.lib.gcuFree(slot))


def test_stale_handles(kit: Kit) -> None:
    module = kit.load(kit.image())
    mark, plan = kit.function("mark", module), kit.function("plan", module)
    check(kit.lib.gcuModuleUnload(module))
    found, info = ctypes.c_void_p(), FunctionInfo()
    said = kit.fails("gcuErrorInvalidHandle", kit.lib.gcuModuleUnload(module))
    assert said == f"{module:#x} is no module, or was one that is gone"
    kit.fails("gcuErrorInvalidHandle", kit.lib.gcuModuleGetFunction(found, module, b"mark"))
    kit.fails("gcuErrorInvalidHandle", kit.lib.gcuModuleGetGlobal(found, module, b"variable"))
    slot = kit.zeros(1)
    for bad in (mark, None, 5, (1 << 64) - 1, slot, kit.stream()):
        for launch in (kit.lib.gcuLaunchKernel, kit.lib.gcuLaunchFolded):
            kit.fails("gcuErrorInvalidHandle", launch(bad, 1, 1, 1, words(slot), 1, None))
        kit.fails("gcuErrorInvalidHandle", kit.lib.gcuFunctionGetInfo(info, bad))
    kit.fails("gcuErrorInvalidHandle", kit.lib.gcuLaunchPlan(plan, words(slot, 1), 2, slot, None))
    again = kit.load(kit.image())  # takes the same places: the old handles stay old
    kit.fails("gcuErrorInvalidHandle",
              kit.lib.gcuLaunchKernel(mark, 1, 1, 1, words(slot), 1, None))
    assert kit.get(slot, np.int64) == 0
    check(kit.lib.gcuModuleUnload(again))


def test_unloading_does_not_pull_code_from_under_a_launch(kit: Kit) -> None:
    module, stream = kit.load(kit.image()), kit.stream()
    flag, slot = np.zeros(1, np.int64), kit.zeros(1)
    for arguments, name in (((flag.ctypes.data, slot), "await"), ((slot, 5), "append")):
        check(kit.lib.gcuLaunchKernel(kit.function(name, module), 1, 1, 1, words(*arguments),
                                      len(arguments), stream))
    check(kit.lib.gcuModuleUnload(module))
    check(kit.lib.gcuStreamDestroy(stream))
    flag[0] = 3
    check(kit.lib.gcuDeviceSynchronize())
    assert kit.get(slot, np.int64) == 35
    check(kit.lib.gcuFree(slot))


def test_bindings_and_header_name_the_same_functions() -> None:
    import re

    from terrazzo.chips.gcu.build import SOURCES
    from terrazzo.chips.gcu.library import OTHERS

    header = Path(SOURCES, "gcu_runtime.h").read_text()
    declared = set(re.findall(r"\b(gcu[A-Z]\w*)\(", re.sub(r"/\*.*?\*/", "", header, flags=re.S)))
    assert declared == set(SIGNATURES) | set(OTHERS) and len(declared) > 50
