"""The installation as onnxruntime's module describes it: providers, versions, logging."""

from __future__ import annotations

import logging
import platform
from typing import Any

from terrazzo.errors import ArgumentError
from terrazzo.ort.providers import CPU, CUDA, REFERENCE, available
from terrazzo.version import __version__ as terrazzo_version

# The interface that this module has is that of this onnxruntime; programs ask before they use it.
API_VERSION = "1.22.0"


def get_available_providers() -> list[str]:
    """The providers that can run models here."""
    return list(available())


def get_all_providers() -> list[str]:
    """Those and the ones that find nothing to run on here."""
    return [CUDA, CPU, REFERENCE]


def get_ep_devices() -> list[Any]:
    """Devices of plug-in providers: none."""
    return []


def get_device() -> str:
    """The best device that models can run on here."""
    return "GPU" if CUDA in available() else "CPU"


def set_default_logger_severity(level: int) -> None:
    """Map onnxruntime's severities (0 verbose ... 4 fatal) onto Python's logging."""
    levels = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
    if isinstance(level, float) or level not in range(len(levels)):
        raise ArgumentError(f"{level!r} is not a severity", hint="give 0 (verbose) to 4 (fatal)")
    logging.getLogger("terrazzo").setLevel(levels[level])


def set_default_logger_verbosity(level: int) -> None:
    """Accepted: what is logged does not get more detailed."""


def set_seed(seed: int) -> None:
    """Accepted: operators that draw numbers have seeds of their own."""


def set_global_thread_pool_sizes(intra_op: int, inter_op: int) -> None:
    """Threads of sessions that name none themselves."""
    from terrazzo.knobs import knobs

    setattr(knobs, "threads", intra_op)  # noqa: B010 - a setting, read-only to type checkers


def enable_telemetry_events() -> None:
    """Nothing is ever sent."""


def disable_telemetry_events() -> None:
    """Nothing is ever sent."""


def has_collective_ops() -> bool:
    """Whether models may run on several devices together: no."""
    return False


def get_version_string() -> str:
    """The version of onnxruntime whose interface this is."""
    return API_VERSION


def get_build_info() -> str:
    """What runs here."""
    return f"terrazzo {terrazzo_version}, interface of onnxruntime {API_VERSION}"


def preload_dlls(*_: Any, **__: Any) -> None:
    """There are none to load."""


def print_debug_info() -> None:
    """What somebody who reports a problem should send."""
    print(get_build_info(), platform.platform(), platform.python_version(), sep="\n")
