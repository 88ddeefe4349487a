"""NVIDIA GPUs as `ChipSpec`s.

Figures are the vendor's for the SXM modules (dense, without sparsity), at boost clock. For a GPU
the fields of a spec read:

- `cores` are streaming multiprocessors, and `vector_bits` a warp of 32 lanes of 32 bits;
- `vector_registers` is what one thread may have of the register file;
- `l1_bytes` is the shared memory one program instance may use, `l2_bytes` the shared L2;
- `peak_flops` counts tensor cores for the half types, tf32 excluded: f32 is the plain FMA units.
"""

from __future__ import annotations

from dataclasses import replace

from terrazzo.chips.spec import ChipSpec, LaunchRules

_WARP_BITS = 32 * 32
_REGISTERS_PER_THREAD = 255
# A launch through Triton's driver, as the host sees it; a replayed graph is below 1 us.
_LAUNCH_COST_US = 4.0
_HOPPER_PEAKS = (
    ("f64", 33.5e12),
    ("f32", 66.9e12),
    ("f16", 989.4e12),
    ("bf16", 989.4e12),
    ("f8e4m3", 1978.9e12),
    ("f8e5m2", 1978.9e12),
    ("i8", 1978.9e12),
)


def _hopper(name: str, memory_gbps: float) -> ChipSpec:
    return ChipSpec(
        name=name,
        kind="cuda",
        cores=132,
        vector_bits=_WARP_BITS,
        vector_registers=_REGISTERS_PER_THREAD,
        features=frozenset({"sm_90", "libdevice", "tensor_cores", "fp8", "wgmma", "tma"}),
        l1_bytes=227 << 10,
        l2_bytes=50 << 20,
        memory_gbps=memory_gbps,
        clock_ghz=1.98,
        peak_flops=_HOPPER_PEAKS,
        compiler=_compiler(),
        launch=LaunchRules(cost_us=_LAUNCH_COST_US, warps=(1, 2, 4, 8, 16, 32)),
    )


def described() -> ChipSpec:
    """Describe the current GPU: what torch tells of it, and of its kind what is known."""
    import torch

    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    arch = found.major * 10 + found.minor
    name = found.name.lower()
    if arch == 90:
        base = next((make() for key, make in (("h200", h200), ("h100", h100)) if key in name),
                    h100())
    else:
        base = _hopper("", 2 * getattr(found, "memory_clock_rate", 0) / 8e6 * getattr(
            found, "memory_bus_width", 0))
    features = {f"sm_{arch}", "libdevice", "tensor_cores"} | ({"wgmma", "tma"} & set(
        base.features if arch == 90 else ())) | ({"fp8"} if arch >= 89 else set())
    return replace(base, name=name.removeprefix("nvidia "), features=frozenset(features),
                   cores=found.multi_processor_count, l2_bytes=found.L2_cache_size,
                   l1_bytes=getattr(found, "shared_memory_per_block_optin", base.l1_bytes),
                   compiler=_compiler())


def _compiler() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"triton {version('triton')}"
    except PackageNotFoundError:
        return ""


def h100() -> ChipSpec:
    """Describe an H100 SXM: 80 GB of HBM3 at 3.35 TB/s."""
    return _hopper("h100", 3350.0)


def h200() -> ChipSpec:
    """Describe an H200 SXM: an H100 with 141 GB of HBM3e at 4.8 TB/s."""
    return _hopper("h200", 4800.0)
