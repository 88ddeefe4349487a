"""Options of sessions and runs. A name that onnxruntime does not have is an AttributeError."""

from __future__ import annotations

import copy
import enum
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from terrazzo.errors import ArgumentError, UnsupportedOperator

if TYPE_CHECKING:
    from terrazzo.ort.values import OrtValue


class GraphOptimizationLevel(enum.IntEnum):
    """Which rewrites run, as onnxruntime counts them."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_LAYOUT = 3
    ORT_ENABLE_ALL = 99


LEVELS = {0: "none", 1: "basic", 2: "extended", 3: "layout", 99: "all"}


class ExecutionMode(enum.IntEnum):
    """Accepted for compatibility: a compiled model is one sequence of kernels."""

    ORT_SEQUENTIAL = 0
    ORT_PARALLEL = 1


class ExecutionOrder(enum.IntEnum):
    """Accepted for compatibility."""

    DEFAULT = 0
    PRIORITY_BASED = 1
    MEMORY_EFFICIENT = 2


class _Options:
    """Attributes with these defaults, and no others."""

    _defaults: dict[str, Any] = {}

    def __init__(self) -> None:
        for name, value in self._defaults.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_entries", {})

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._defaults:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        object.__setattr__(self, name, _fitting(name, value, self._defaults[name]))

    def _copied(self) -> Self:
        """The same options, that change by themselves."""
        made = type(self)()
        for name, value in vars(self).items():
            object.__setattr__(made, name, copy.copy(value))
        return made

    if TYPE_CHECKING:
        _entries: dict[str, str]

        def __getattr__(self, name: str) -> Any: ...


def _fitting(name: str, value: Any, default: Any) -> Any:
    """A value of an option, if it can be one: numbers are whole, levels those that there are."""
    if isinstance(default, bool) or not isinstance(default, int):
        return value
    try:
        return type(default)(operator.index(value))
    except (TypeError, ValueError):
        kinds = " or ".join(m.name for m in type(default)) if isinstance(default, enum.Enum) else (
            "a whole number")
        raise ArgumentError(f"{name} cannot be {value!r}", hint=f"set it to {kinds}") from None


class SessionOptions(_Options):
    """How a session is made; every attribute of onnxruntime's may be set."""

    _defaults = {
        "graph_optimization_level": GraphOptimizationLevel.ORT_ENABLE_ALL,
        "optimized_model_filepath": "", "enable_profiling": False,
        "profile_file_prefix": "onnxruntime_profile_", "intra_op_num_threads": 0,
        "inter_op_num_threads": 0, "execution_mode": ExecutionMode.ORT_SEQUENTIAL,
        "execution_order": ExecutionOrder.DEFAULT, "enable_mem_pattern": True,
        "enable_cpu_mem_arena": True, "enable_mem_reuse": True, "log_severity_level": -1,
        "log_verbosity_level": 0, "logid": "", "use_deterministic_compute": False,
        "use_per_session_threads": True,
    }

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "_sizes", {})
        object.__setattr__(self, "_given", {})
        object.__setattr__(self, "_wanted_providers", [])

    if TYPE_CHECKING:
        _sizes: dict[str, int]
        _given: dict[str, OrtValue]
        _wanted_providers: list[tuple[str, dict[str, str]]]

    def add_session_config_entry(self, key: str, value: str) -> None:
        """Remember a setting by name; like onnxruntime, without asking what it is."""
        self._entries[key] = value

    def get_session_config_entry(self, key: str) -> str:
        """A setting that was remembered."""
        if key not in self._entries:
            raise ArgumentError(f"there is no session option {key!r}")
        return self._entries[key]

    def add_free_dimension_override_by_name(self, name: str, size: int) -> None:
        """Compile for one size of a symbolic dimension."""
        try:
            number = operator.index(size)
        except TypeError:
            number = -1
        if number < 0:
            raise ArgumentError(f"{size!r} is not a size of the dimension {name!r}",
                                hint="give a whole number from 0 on")
        self._sizes[name] = number

    def add_free_dimension_override_by_denotation(self, denotation: str, size: int) -> None:
        """Refused: no model that we know of denotes its dimensions."""
        raise UnsupportedOperator(f"dimensions are not known by denotation ({denotation!r})",
                                  hint="use add_free_dimension_override_by_name")

    def add_initializer(self, name: str, ort_value: OrtValue) -> None:
        """Use a value for an initialiser of the model."""
        self._given[name] = ort_value

    def add_external_initializers(self, names: Sequence[str], ort_values: Sequence[OrtValue]
                                  ) -> None:
        """Use values for initialisers whose data the model leaves to other files."""
        for name, value in zip(names, ort_values, strict=True):
            self.add_initializer(name, value)

    def add_provider(self, provider_name: str, options: dict[str, str] | None = None) -> None:
        """Ask for a provider, as `InferenceSession(providers=...)` does."""
        self._wanted_providers.append((provider_name, options or {}))

    def has_providers(self) -> bool:
        """Whether any provider was asked for here."""
        return bool(self._wanted_providers)

    def register_custom_ops_library(self, path: str) -> None:
        """Refused: such libraries hold onnxruntime's own binary interface."""
        raise UnsupportedOperator(
            f"{path} holds operators for onnxruntime's binary interface",
            hint='write the operator once with @tz.op(domain="...") instead')


class RunOptions(_Options):
    """How one call runs: `terminate` refuses it; the rest is accepted for compatibility."""

    _defaults = {
        "log_severity_level": -1, "log_verbosity_level": 0, "logid": "",
        "only_execute_path_to_fetches": False, "terminate": False,
        "training_mode": False,
    }

    def add_run_config_entry(self, key: str, value: str) -> None:
        """Remember a setting; nothing here depends on it."""
        self._entries[key] = value

    def get_run_config_entry(self, key: str) -> str:
        """A setting that was remembered."""
        if key not in self._entries:
            raise ArgumentError(f"there is no run option {key!r}")
        return self._entries[key]
