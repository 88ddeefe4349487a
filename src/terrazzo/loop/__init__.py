"""L3, Loop IR: loops, flat buffers and scalar arithmetic. LLVM and the simulator start from it."""
