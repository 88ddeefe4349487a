"""NVIDIA GPUs: descriptions, and the Triton source of every kernel; nothing runs there yet."""
