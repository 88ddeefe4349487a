"""NVIDIA GPUs: their description, Triton kernels, plans that launch them, and a simulator."""
