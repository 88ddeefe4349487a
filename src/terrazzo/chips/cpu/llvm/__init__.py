"""Machine code for CPUs: LLVM IR written as text, vector maths, and what compiles them."""
