"""Kernels in Gluon: Triton where layouts, copies and the roles of warps are told by hand."""
