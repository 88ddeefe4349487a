"""Running compiled code: executables, memory plans, threads, the compile cache, the profiler."""
