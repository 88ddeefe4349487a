"""onnxruntime's Python API on terrazzo's sessions: `import terrazzo.ort as ort` is the one change.

What a program written for onnxruntime calls is here under the same names, with the same meaning.
Options that steer what terrazzo does not have (memory arenas, logging ids) are accepted and kept.
Errors are those of `terrazzo.errors`, under onnxruntime's names where programs catch them.

Libraries that import onnxruntime themselves get this module instead once it stands in its place:

    sys.modules["onnxruntime"] = terrazzo.ort
"""

from terrazzo.chips.registry import load_default
from terrazzo.ort import capi
from terrazzo.ort.devices import OrtDevice
from terrazzo.ort.errors import (
    Fail,
    InvalidArgument,
    InvalidGraph,
    InvalidProtobuf,
    NoSuchFile,
    NotImplemented,
    RuntimeException,
)
from terrazzo.ort.metadata import ModelMetadata, NodeArg
from terrazzo.ort.options import (
    ExecutionMode,
    ExecutionOrder,
    GraphOptimizationLevel,
    RunOptions,
    SessionOptions,
)
from terrazzo.ort.session import InferenceSession
from terrazzo.ort.system import (
    API_VERSION,
    disable_telemetry_events,
    enable_telemetry_events,
    get_all_providers,
    get_available_providers,
    get_build_info,
    get_device,
    get_ep_devices,
    get_version_string,
    has_collective_ops,
    preload_dlls,
    print_debug_info,
    set_default_logger_severity,
    set_default_logger_verbosity,
    set_global_thread_pool_sizes,
    set_seed,
)
from terrazzo.ort.tools import folders
from terrazzo.ort.values import IOBinding, OrtValue

load_default()
__path__ += folders()  # its tools, as onnxruntime.quantization
SessionIOBinding = IOBinding
__version__ = version = API_VERSION
package_name = "terrazzo"

__all__ = [
    "ExecutionMode", "ExecutionOrder", "Fail", "GraphOptimizationLevel", "IOBinding",
    "InferenceSession", "InvalidArgument", "InvalidGraph", "InvalidProtobuf", "ModelMetadata",
    "NoSuchFile", "NodeArg", "NotImplemented", "OrtDevice", "OrtValue", "RunOptions",
    "RuntimeException", "SessionIOBinding", "SessionOptions", "__version__", "capi",
    "disable_telemetry_events", "enable_telemetry_events", "get_all_providers",
    "get_available_providers", "get_build_info", "get_device", "get_ep_devices",
    "get_version_string", "has_collective_ops", "package_name", "preload_dlls",
    "print_debug_info", "set_default_logger_severity", "set_default_logger_verbosity",
    "set_global_thread_pool_sizes", "set_seed", "version",
]
