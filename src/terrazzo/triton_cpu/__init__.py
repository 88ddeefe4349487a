"""The Triton backend `cpu`: kernels written with `@triton.jit` run on the CPU, without a GPU.

Triton finds `compiler` and `driver` here through the entry point group `triton.backends`.

| file | what it does |
|---|---|
| `frontend/` | from TTIR to Loop IR, for a chip that it is told of |
| `compiler`, `backend` | what Triton sees of it: its stages by name, options |
| `stages`, `cpu_stages` | what they do: ttir, loop, llir, o (each readable in `kernel.asm`) |
| `launch/`, `driver` | running kernels, and the device that the CPU pretends to be |
| `libdevice` | functions of `triton.language.extra.libdevice`, as kernels call them |
| `deep` | stack for kernels of many thousand operations |
| `activate` | chooses the backend where nothing else does |

docs/triton-cpu.md says what is supported and what is missing.
"""

import triton  # finds the modules here; importing one of them first would disturb it

assert triton
