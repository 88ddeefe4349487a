"""The Triton backend `cpu`: kernels written with `@triton.jit` run on the CPU, without a GPU.

Triton finds `compiler` and `driver` here through the entry point group `triton.backends`. The way
of a kernel, and where to look:

| file | what it does |
|---|---|
| `activate` | chooses the backend where nothing else does |
| `compiler` | options and stages: ttir, loop, llir, o (each readable in `kernel.asm`) |
| `ttir` | reads TTIR in MLIR's generic form, with source locations |
| `values`, `elementwise` | a tile is a function from indices to a scalar expression, until needed |
| `uses` | who needs a value: what is dear and needed twice is kept in memory |
| `lower`, `lower_*` | one handler an operation, by families |
| `nest`, `addresses` | loop nests; affine addresses, masks as loop bounds, whole tiles |
| `fusion` | neighbouring loops over the same range become one |
| `launch`, `driver` | the grid over the thread pool, a launch in a few microseconds |
| `waiting` | which programs wait for each other, and need threads of their own |
| `reports`, `reporting` | what kernels tell their launcher: prints, assertions, findings |
| `sanitizer`, `shadows` | TZ_SANITIZE=1: every access is checked before it happens |
| `conversions` | casts between floats: roundings, saturation, fp8e4b15 |
| `libdevice`, `externals*` | functions of `triton.language.extra.libdevice`, and their meaning |

docs/triton-cpu.md says what is supported and what is missing.
"""

import triton  # finds the modules here; importing one of them first would disturb it

assert triton
