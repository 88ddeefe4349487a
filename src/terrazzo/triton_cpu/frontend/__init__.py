"""The front end: TTIR, as Triton prints it, to one function of Loop IR. It knows no CPU.

What it goes by of the chip it is handed (`state.Target`). The way of a kernel:

| file | what it does |
|---|---|
| `ttir` | reads TTIR in MLIR's generic form, with source locations |
| `values`, `elementwise` | a tile is a function from indices to a scalar expression, until needed |
| `uses` | who needs a value: what is dear and needed twice is kept in memory |
| `lower`, `lower_*` | one handler an operation, by families |
| `state` | what lowering knows of a kernel while it walks it |
| `functions`, `pointers` | functions inside kernels; pointers, and where they may lead |
| `nest`, `addresses` | loop nests; affine addresses, masks as loop bounds, whole tiles |
| `fusion` | neighbouring loops over the same range become one |
| `waiting`, `patience` | which programs wait for each other, and for how long they may |
| `reports`, `sanitizer` | what kernels tell their launcher: prints, assertions, findings |
| `conversions` | casts between floats: roundings, saturation, fp8e4b15 |
| `externals*` | what functions of `triton.language.extra.libdevice` mean |
| `inline_asm`, `ptx/` | assembly inside kernels |
"""
