"""Descriptions of chips: what they say, and that the host's is one we can compile for."""

from __future__ import annotations

import dataclasses
import os

import pytest

from terrazzo.chips import ChipSpec, LaunchRules
from terrazzo.chips.cpu.description import avx2_spec, cpu_spec, host, neon_spec, usable_cores
from terrazzo.errors import KnobError
from terrazzo.knobs import knobs

SSE_AND_AVX = ["sse2", "avx", "avx2", "fma", "f16c"]
AVX512 = [*SSE_AND_AVX, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni"]


def test_the_host_is_described() -> None:
    chip = host()
    assert chip.kind == "cpu"
    assert chip.cores == usable_cores() >= 1
    assert chip.vector_bits in (128, 256, 512)
    assert chip.l1_bytes < chip.l2_bytes
    assert chip.peak("f32") == 2 * chip.peak("f64") > 1e9
    assert chip.memory_gbps > 0
    assert chip.lanes(32) * 32 == chip.vector_bits
    assert host() is chip


def test_cores_follow_the_affinity_mask() -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("needs an operating system with affinity masks")
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_narrower_vectors_take_the_wide_instructions_away() -> None:
    chip = cpu_spec("icelake-server", "x86_64-unknown-linux-gnu", AVX512, vector_bits=256)
    assert chip.vector_bits == 256
    assert chip.vector_registers == 16
    assert chip.has("avx2", "fma")
    assert not any(name.startswith("avx512") for name in chip.features)
    assert "-avx512f" in chip.llvm_features.split(",")
    assert "+avx2" in chip.llvm_features.split(",")


def test_sse_keeps_neither_avx_nor_fma() -> None:
    chip = cpu_spec("icelake-server", "x86_64-unknown-linux-gnu", AVX512, vector_bits=128)
    assert chip.features == {"sse2"}
    assert {"-avx", "-fma", "-avx512f"} <= set(chip.llvm_features.split(","))


def test_full_width_is_not_split_in_halves() -> None:
    chip = cpu_spec("icelake-server", "x86_64-unknown-linux-gnu", AVX512)
    assert (chip.vector_bits, chip.vector_registers) == (512, 32)
    assert "-prefer-256-bit" in chip.llvm_features.split(",")
    assert chip.peak("i8") == 4 * chip.peak("f32")


def test_the_knob_narrows_the_host() -> None:
    with knobs.override(vector_bits=128):
        assert host().vector_bits == 128
    assert host().vector_bits >= 128


def test_vectors_wider_than_the_chip_are_refused_with_advice() -> None:
    with pytest.raises(KnobError, match="no vectors of 512 bits") as caught:
        cpu_spec("haswell", "x86_64-unknown-linux-gnu", ["avx2", "fma"], vector_bits=512)
    assert "128, 256, or to 0" in str(caught.value)


def test_other_processors() -> None:
    assert avx2_spec().vector_bits == 256
    assert avx2_spec().vector_registers == 16
    assert neon_spec().llvm_triple.startswith("aarch64")
    assert (neon_spec().vector_bits, neon_spec().vector_registers) == (128, 32)
    assert neon_spec().peak("f16") == 2 * neon_spec().peak("f32")


def test_fingerprints_tell_code_apart_and_nothing_else() -> None:
    chip = avx2_spec()
    assert chip.fingerprint == avx2_spec().fingerprint
    assert chip.fingerprint == dataclasses.replace(chip, memory_gbps=1.0).fingerprint
    others = [neon_spec(), avx2_spec(cores=8), dataclasses.replace(chip, l2_bytes=1)]
    assert len({chip.fingerprint, *(other.fingerprint for other in others)}) == 4


def test_a_chip_is_a_value() -> None:
    assert avx2_spec() == avx2_spec()
    assert hash(avx2_spec()) == hash(avx2_spec())
    with pytest.raises(dataclasses.FrozenInstanceError):
        avx2_spec().cores = 3  # type: ignore[misc]


def test_an_unlisted_dtype_runs_at_the_rate_of_f32() -> None:
    chip = ChipSpec("toy", "gcu", 4, 512, 32, peak_flops=(("f32", 5.0),))
    assert chip.peak("f16") == 5.0
    assert ChipSpec("toy", "gcu", 4, 512, 32).peak("f32") == 0.0
    assert str(chip).startswith("toy (gcu): 4 cores x 512 bits")


def test_launch_rules() -> None:
    rules = LaunchRules(free_grid=48, grid_multiple=48, warps=(1,))
    assert [n for n in (0, 1, 48, 49, 96, 100) if rules.accepts_grid(n)] == [1, 48, 96]
    assert [rules.round_up_grid(n) for n in (0, 7, 48, 49, 97)] == [1, 7, 48, 96, 144]
    assert LaunchRules().accepts_grid(12345)
    assert LaunchRules().round_up_grid(7) == 7
