"""What Inductor generates for the device: Triton kernels, and Python code that launches them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import triton
from torch._inductor.codegen.common import (
    DeviceOpOverrides,
    register_backend_for_device,
    register_device_op_overrides,
)
from torch._inductor.codegen.triton import TritonKernel, TritonScheduling
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.custom_graph_pass import CustomGraphModulePass
from torch._inductor.runtime.benchmarking import register_benchmarker

from terrazzo.runtime.cache import source_stamp
from terrazzo.torch_device.inductor import announce
from terrazzo.torch_device.inductor.convolutions import use_our_convolutions
from terrazzo.torch_device.inductor.pooling import gather_pooled_gradients
from terrazzo.torch_device.inductor.products import OUR_IMPORTS, use_templates
from terrazzo.torch_device.start import name
from terrazzo.triton_gcu.activate import activate
from terrazzo.triton_gcu.chip import description
from terrazzo.triton_gcu.driver import GCUDriver, modelled_bench


class WrapperParts(DeviceOpOverrides):
    """How generated Python speaks of the device."""

    def import_get_raw_stream_as(self, name: str) -> str:
        return f"from terrazzo.torch_device.inductor.interface import raw_stream as {name}"

    def set_device(self, device_idx: int) -> str:
        return f"torch.{name()}.set_device({device_idx})"

    def synchronize(self) -> str:
        return f"torch.{name()}.synchronize()"

    def device_guard(self, device_idx: int) -> str:
        return f"torch.{name()}.device({device_idx})"

    def current_stream(self) -> str:
        return f"torch.{name()}.current_stream()"


class Kernel(TritonKernel):
    """A generated kernel: its block sizes are chosen by `heuristics.py`, from its exact sizes."""

    @classmethod
    @cache
    def gen_common_triton_imports(cls) -> str:
        return TritonKernel.gen_common_triton_imports() + OUR_IMPORTS

    def inductor_meta_per_kernel(self) -> dict[str, Any]:
        sizes = {axis: int(size) for axis, size in self.numels.items() if _is_number(size)}
        return {**super().inductor_meta_per_kernel(), "gcu_sizes": sizes,
                "gcu_bytes": int(self.estimate_kernel_num_bytes())}


def _is_number(size: Any) -> bool:
    return isinstance(size, int) or bool(getattr(size, "is_number", False))


class Scheduling(TritonScheduling):
    """Inductor's own way of fusing into Triton kernels; Triton compiles for the device from now on.

    Not before a graph has something there: others have kernels of their own, on the CPU.
    """

    kernel_type = Kernel

    def __init__(self, scheduler: Any):
        if not isinstance(_active_driver(), GCUDriver):
            activate()
        super().__init__(scheduler)


class Graphs(CustomGraphModulePass):
    """What we change in graphs; its name makes code that Inductor keeps ours, as we are now."""

    def __call__(self, gm: Any) -> None:
        use_templates(gm.graph)
        use_our_convolutions(gm.graph)
        gather_pooled_gradients(gm.graph)

    def uuid(self) -> str:
        """What generated code depends on beside Inductor."""
        return f"terrazzo-{source_stamp()}-{description().fingerprint}"


def benchmark(_benchmarker: Any, call: Callable[[], Any], *, warmup: Any = None, rep: Any = None,
              **options: Any) -> Any:
    """Modelled milliseconds of a call."""
    known = ("quantiles", "return_mode")
    return modelled_bench(call, **{key: options[key] for key in known if key in options})


def register() -> None:
    """Tell Inductor how to generate code for the device."""
    announce()
    register_device_op_overrides(name(), WrapperParts())
    register_backend_for_device(name(), Scheduling, PythonWrapperCodegen,
                                device_custom_pass=Graphs())
    register_benchmarker(name(), benchmark, override=True)


def _active_driver() -> Any:
    found = triton.runtime.driver.active
    return getattr(found, "_obj", found)


register()
