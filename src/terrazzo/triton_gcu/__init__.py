"""The Triton backend `gcu`: kernels written with `@triton.jit` run on a virtual chip.

Triton finds `compiler` and `driver` here through the entry point group `triton.backends`.

| file | what it does |
|---|---|
| `chip` | which chip that is, and its runtime library |
| `compiler` | what Triton sees of it: its stages by name, options |
| `gcu_stages` | what they do: ttir, loop, llir, gcuimg (each readable in `kernel.asm`) |
| `launch` | loaded images, and launches by the library |
| `streams` | which device and stream a launch goes to |
| `driver` | devices, streams, and benchmarks by modelled time |
| `activate` | chooses the backend where nothing else does |

What is the same for the CPU comes from `triton_cpu`: TTIR to loops, arguments, reports.
docs/gcu.md says what is the chip's own.
"""

import triton  # finds the modules here; importing one of them first would disturb it

assert triton
