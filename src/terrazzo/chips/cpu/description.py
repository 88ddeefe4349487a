"""The host processor, and other processors we can compile for, as `ChipSpec`s."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from terrazzo.chips.spec import ChipSpec, LaunchRules
from terrazzo.errors import KnobError
from terrazzo.knobs import knobs

_AVX512_NEEDED = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
# Only the widths that a code path exists for; the value is a test for "needs wider registers
# than this", so that narrowing the vectors also takes away the instructions that widen them.
_NEEDS_WIDER_THAN = {
    512: re.compile(r"(?!)"),
    256: re.compile(r"avx512.*|avx10.*|amx-avx512"),
    128: re.compile(r"avx.*|amx-avx512|fma4?|f16c|xop|vaes|vpclmulqdq|sha512|sm[34]"),
}

# What functions are allowed that multiply pairs of bfloat16, also in vectors of 256 bits: no
# narrower instruction set has the instruction.
PAIRS_NEED = ("avx512f", "avx512bw", "avx512vl", "avx512bf16")

# The lines of /proc/cpuinfo that tell one kind of processor from another.
_IDENTITY = re.compile(
    r"^(?:vendor_id|cpu family|model|model name|stepping|flags"
    r"|CPU (?:implementer|architecture|variant|part|revision)|Features)\s*:.*$",
    re.MULTILINE,
)

# Without cpufreq or a clock in the model name, all we can do is guess.
_GUESSED_CLOCK_GHZ = 2.5
# One core of a current server or desktop draws 10-25 GB/s; sockets saturate near 200-300 GB/s.
_GBPS_PER_CORE, _GBPS_PER_SOCKET = 18.0, 250.0
# A launch of the pool whose workers are awake: 0.1 us for 2 chunks, 0.3 us for 8, measured.
_LAUNCH_COST_US = 0.3


def host(vector_bits: int | None = None) -> ChipSpec:
    """Describe the processor we run on, with vectors as wide as `knobs.vector_bits` allows."""
    return _host(knobs.vector_bits if vector_bits is None else vector_bits)


@lru_cache(maxsize=8)
def _host(vector_bits: int) -> ChipSpec:
    return cpu_spec(
        **(_remembered_host() or _ask_llvm()),
        vector_bits=vector_bits,
        cores=usable_cores(),
        caches=_cache_sizes(),
        clock_ghz=_clock_ghz(),
    )


@lru_cache(maxsize=1)
def llvmlite_version() -> str:
    """Tell which llvmlite would be imported, without importing it, which takes 50 ms and 40 MB."""
    found = importlib.util.find_spec("llvmlite")
    text = _read(Path(found.origin).with_name("_version.py")) if found and found.origin else ""
    version = re.search(r"""version_version = ['"](.+)['"]""", text)
    if version:
        return version.group(1)
    import llvmlite

    return str(llvmlite.__version__)


_QUESTION = """
import llvmlite.binding as llvm
known = {"name": llvm.get_host_cpu_name(), "triple": llvm.get_process_triple(),
         "features": dict(llvm.get_host_cpu_features())}
"""


def _ask_llvm() -> dict[str, Any]:
    """LLVM's name, triple and features of the host; remembered for processes to come."""
    import subprocess  # once for a machine: those to come find the answer
    import tempfile

    answer: dict[str, Any] = {}
    if "llvmlite.binding" not in sys.modules:  # 40 MB that a process with compiled code can spare
        with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
            asked = subprocess.run(
                [sys.executable, "-c", f"{_QUESTION}import json\nprint(json.dumps(known))"],
                capture_output=True, check=True, timeout=60)
            answer["known"] = json.loads(asked.stdout)
    if not answer:
        exec(_QUESTION, answer)
    known: dict[str, Any] = answer["known"]
    path = _host_file()
    if path:
        text = json.dumps(known)
        # A cache that cannot be written costs time, nothing else.
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
            with os.fdopen(handle, "w") as file:
                file.write(f"{_digest(text)}\n{text}")
            os.replace(temporary, path)
    return known


def _remembered_host() -> dict[str, Any] | None:
    path = _host_file()
    digest, _, text = _read(path).partition("\n") if path else ("", "", "")
    return json.loads(text) if digest and digest == _digest(text) else None


def _host_file() -> Path | None:
    """The file of the cache that remembers what LLVM says of this processor."""
    lines = set(_IDENTITY.findall(_read("/proc/cpuinfo")))
    if not knobs.cache or not lines:
        return None
    key = _digest("\n".join(["host", llvmlite_version(), os.uname().machine, *sorted(lines)]))
    return Path(os.path.expanduser(knobs.cache_dir)) / key[:2] / f"{key[2:]}.json"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def avx2_spec(cores: int = 1) -> ChipSpec:
    """Describe a plain AVX2 + FMA processor (x86-64-v3), whatever the host is."""
    names = "sse sse2 sse3 ssse3 sse4.1 sse4.2 popcnt cx16 avx avx2 fma f16c bmi bmi2 lzcnt movbe"
    return cpu_spec("x86-64-v3", "x86_64-unknown-linux-gnu", names.split(), cores=cores)


def neon_spec(cores: int = 1) -> ChipSpec:
    """Describe a 64-bit Arm server core with half-precision and dot-product instructions."""
    names = "neon fp-armv8 fullfp16 dotprod lse crc rdm"
    return cpu_spec("neoverse-n1", "aarch64-unknown-linux-gnu", names.split(), cores=cores)


def cpu_spec(
    name: str,
    triple: str,
    features: Mapping[str, bool] | Iterable[str],
    *,
    vector_bits: int = 0,
    cores: int = 1,
    caches: tuple[int, int, int] = (32 << 10, 512 << 10, 8 << 20),
    clock_ghz: float = _GUESSED_CLOCK_GHZ,
) -> ChipSpec:
    """Describe a processor by LLVM's names for it.

    `features` are LLVM's feature names, all present, or a mapping that also says which are
    absent (LLVM would otherwise assume those that the processor's name implies).
    `vector_bits` 0 means as wide as the features allow.
    """
    known = dict(features) if isinstance(features, Mapping) else dict.fromkeys(features, True)
    widest = _widest_vector(known)
    if vector_bits not in (0, *(width for width in _NEEDS_WIDER_THAN if width <= widest)):
        choices = ", ".join(str(width) for width in sorted(_NEEDS_WIDER_THAN) if width <= widest)
        raise KnobError(
            f"the processor {name!r} has no vectors of {vector_bits} bits",
            hint=f"set TZ_VECTOR_BITS to one of {choices}, or to 0 for the widest",
        )
    bits = vector_bits or widest
    too_wide = _NEEDS_WIDER_THAN[bits]
    usable = {key: on and not too_wide.fullmatch(key) for key, on in known.items()}
    present = frozenset(key for key, on in usable.items() if on)
    if bits == 256 and all(known.get(name) for name in PAIRS_NEED):
        present |= {"avx512bf16"}  # single functions may use it, LLVM by itself may not
    if bits == 512:
        # Intel's tuning tables make LLVM split our vectors in halves unless told otherwise.
        usable["prefer-256-bit"] = False
    l1, l2, l3 = caches
    return ChipSpec(
        name=name,
        kind="cpu",
        cores=cores,
        vector_bits=bits,
        vector_registers=_vector_registers(triple, bits),
        features=present,
        compiler=f"llvmlite {llvmlite_version()}",
        llvm_triple=triple,
        llvm_cpu=name,
        llvm_features=",".join(f"{'+' if on else '-'}{key}" for key, on in sorted(usable.items())),
        l1_bytes=l1,
        l2_bytes=l2,
        l3_bytes=l3,
        memory_gbps=min(_GBPS_PER_CORE * cores, _GBPS_PER_SOCKET),
        clock_ghz=clock_ghz,
        peak_flops=_peak_flops(name, present, bits, cores * clock_ghz * 1e9),
        launch=LaunchRules(cost_us=_LAUNCH_COST_US),
    )


def usable_cores() -> int:
    """Count the cores this process may run on: its affinity mask and its container's quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def _widest_vector(features: Mapping[str, bool]) -> int:
    if all(features.get(name) for name in _AVX512_NEEDED):
        return 512
    return 256 if features.get("avx2") and features.get("fma") else 128


def _vector_registers(triple: str, bits: int) -> int:
    return 16 if triple.startswith("x86_64") and bits < 512 else 32


def _peak_flops(
    name: str, features: frozenset[str], bits: int, cycles_per_second: float
) -> tuple[tuple[str, float], ...]:
    # Two FMA pipes a core is the rule; Zen 4 runs a 512-bit operation as two halves.
    pipes = 1 if bits == 512 and name == "znver4" else 2
    has_fma = "fma" in features or "neon" in features
    per_pipe = 2.0 if has_fma else 1.0
    f32 = cycles_per_second * pipes * per_pipe * bits / 32
    fast_half = not features.isdisjoint({"avx512fp16", "fullfp16"})
    fast_bfloat = not features.isdisjoint({"avx512bf16", "bf16"})
    fast_bytes = not features.isdisjoint({"avx512vnni", "avxvnni", "dotprod"})
    return (
        ("f64", f32 / 2),
        ("f32", f32),
        ("f16", f32 * 2 if fast_half else f32),
        ("bf16", f32 * 2 if fast_bfloat else f32),
        ("i8", f32 * 4 if fast_bytes else f32),
    )


def _cache_sizes() -> tuple[int, int, int]:
    sizes = {1: 32 << 10, 2: 512 << 10, 3: 8 << 20}
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    for folder in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        level, kind, size = (_read(folder / part) for part in ("level", "type", "size"))
        if kind != "Instruction" and level.isdigit() and size[:-1].isdigit():
            sizes[int(level)] = int(size[:-1]) * units.get(size[-1], 1)
    return sizes[1], sizes[2], sizes[3]


def _clock_ghz() -> float:
    kilohertz = _read("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
    if kilohertz.isdigit():
        return int(kilohertz) / 1e6
    megahertz = re.search(r"^cpu MHz\s*:\s*([\d.]+)", _read("/proc/cpuinfo"), re.MULTILINE)
    return float(megahertz.group(1)) / 1e3 if megahertz else _GUESSED_CLOCK_GHZ


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""
