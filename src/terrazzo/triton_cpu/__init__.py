"""The Triton backend `cpu`: kernels written with `@triton.jit` run on the CPU, without a GPU."""
