"""Triton source from fused groups: the generator for GPUs and other chips that speak Triton."""

from terrazzo.codegen.triton.source import triton_source

__all__ = ["triton_source"]
