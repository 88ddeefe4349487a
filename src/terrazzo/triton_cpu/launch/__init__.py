"""Running kernels: code around the loops of a kernel, launches, faults and reports.

| file | what it does |
|---|---|
| `entry` | the native function that a launch calls, in LLVM IR |
| `arguments` | arguments as 64-bit integers, in code written for each signature |
| `launcher` | the grid over the thread pool, a launch in a few microseconds |
| `faults` | a kernel that touches no memory of ours is an error of Python |
| `reporting` | what kernels told, as text and errors after the launch |
| `shadows` | TZ_SANITIZE=1: which memory exists, and who wrote it |
"""
