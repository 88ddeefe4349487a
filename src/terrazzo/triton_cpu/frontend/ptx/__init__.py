"""Inline PTX: the assembly of GPUs as kernels hold it, read and given its meaning on the CPU.

    text -- parse --> Program -- expressions --> scalars         arithmetic, one value a register
                              -- statements --> Loop IR          memory, jumps back, clocks

What an instruction means is a row of a table: `arithmetic`, `bits` and `convert` hold them.
"""
