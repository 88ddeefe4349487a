"""The description of a chip: what schedules, cost model, simulator, roofline and report read.

A chip is data. Two chips that differ only in numbers need no new code, and a chip that does not
exist yet starts as one `ChipSpec`. Every field means the same for every kind of chip:

| field | cpu | cuda | gcu |
|---|---|---|---|
| `cores` | hardware threads we may use | multiprocessors | compute units |
| `vector_bits` | SIMD register | a warp of 32-bit lanes | vector unit |
| `l1_bytes` | L1 data cache | shared memory | local scratchpad |
| `launch.cost_us` | waking the thread pool | a kernel launch | a kernel launch |
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from terrazzo.index import Index, ceildiv, maximum, minimum

# Of a chip that may sum up 8-bit floats as its tensor cores do: a setting adds it.
FAST_FP8_SUMS = "fast_fp8_sums"


@dataclass(frozen=True)
class LaunchRules:
    """What a launch costs on a chip, and which grids of programs it accepts."""

    cost_us: float = 0.0
    """Time from asking for a launch to the first program running."""
    free_grid: int = 0
    """A grid of at most this many programs is always accepted; 0 means any grid is."""
    grid_multiple: int = 1
    """A grid larger than `free_grid` must be a multiple of this."""
    warps: tuple[int, ...] = ()
    """Numbers of warps a program may have; empty means the chip does not care."""

    @property
    def accepts_all(self) -> bool:
        """Tell whether any grid may be launched as it is."""
        return self.free_grid == 0 or self.grid_multiple == 1

    def accepts_grid(self, programs: int) -> bool:
        """Tell whether a grid of this many programs may be launched."""
        return programs > 0 and self.round_up_grid(programs) == programs

    def round_up_grid(self, programs: Index) -> Index:
        """Give the smallest grid the chip accepts that has at least this many programs.

        Their number may be symbolic: whoever launches without us prints what this answers.
        """
        programs = maximum(programs, 1)
        if self.accepts_all:
            return programs
        is_over = minimum(maximum(programs - self.free_grid, 0), 1)
        return programs + is_over * (
            ceildiv(programs, self.grid_multiple) * self.grid_multiple - programs)

    def warps_for(self, wanted: int) -> int:
        """Give the number of warps of a program that comes nearest to what it wants."""
        if not self.warps:
            return wanted
        return max([w for w in self.warps if w <= wanted], default=min(self.warps))


class Roofline(NamedTuple):
    """What a chip does at best."""

    bytes_per_second: float
    flops_per_second: float  # of float32

    def seconds(self, flops: float, size: float) -> float:
        """The least time that so much arithmetic on so much memory takes."""
        return max(size / self.bytes_per_second, flops / self.flops_per_second)


@dataclass(frozen=True)
class ChipSpec:
    """One chip, described once for every level that has to know it."""

    name: str
    """A name for people: "icelake-server", "h200"."""
    kind: str
    """What users call chips of this kind: "cpu", "cuda"."""
    cores: int
    """Independent units that run programs or chunks at the same time."""
    vector_bits: int
    """Width of one vector operation."""
    vector_registers: int
    """Vector registers a micro-kernel may keep its accumulators in."""
    features: frozenset[str] = frozenset()
    """Names of instruction-set features that are present and may be used."""

    compiler: str = ""
    """What makes its code, with its version: another version makes other code."""
    llvm_triple: str = ""
    llvm_cpu: str = ""
    llvm_features: str = ""
    """What LLVM is told: "+avx2,-avx512f,..."; empty when code does not come from LLVM."""

    l1_bytes: int = 32 << 10
    l2_bytes: int = 0
    l3_bytes: int = 0
    """Sizes of the nearest, next and last on-chip memory as one core sees them; 0 means none."""
    memory_gbps: float = 0.0
    """Main-memory bandwidth of the whole chip in GB/s. For a CPU this is an estimate."""
    clock_ghz: float = 0.0
    peak_flops: tuple[tuple[str, float], ...] = ()
    """Peak of the whole chip in operations per second for each dtype name, as pairs."""
    launch: LaunchRules = field(default_factory=LaunchRules)

    def has(self, *features: str) -> bool:
        """Tell whether all the named instruction-set features may be used."""
        return self.features.issuperset(features)

    def lanes(self, bits: int) -> int:
        """Count the elements of this many bits that fit into one vector."""
        return max(1, self.vector_bits // bits)

    def peak(self, dtype: str) -> float:
        """Give the peak rate for a dtype in operations per second; f32's when it is not listed."""
        rates = dict(self.peak_flops)
        return rates.get(dtype, rates.get("f32", 0.0))

    @cached_property
    def fingerprint(self) -> str:
        """A text that is equal for two chips exactly when the same generated code suits both."""
        import hashlib  # nobody who only writes operators waits for it

        target = "|".join((self.kind, self.compiler, self.llvm_triple, self.llvm_cpu,
                           self.llvm_features))
        shape = f"{self.vector_bits}|{self.vector_registers}|{','.join(sorted(self.features))}"
        memory = f"{self.cores}|{self.l1_bytes}|{self.l2_bytes}|{self.l3_bytes}|{self.launch}"
        digest = hashlib.sha256(f"{target}|{shape}|{memory}".encode()).hexdigest()
        return f"{self.kind}-{digest[:24]}"

    def __str__(self) -> str:
        peak = self.peak("f32") / 1e9
        return (
            f"{self.name} ({self.kind}): {self.cores} cores x {self.vector_bits} bits, "
            f"{peak:.0f} GFLOP/s f32, {self.memory_gbps:.0f} GB/s"
        )
