"""AOTAutograd's key for a graph, without what only code of Inductor's depends on.

Torch hashes the sources of Triton and of Inductor, and imports all that Inductor generates code
with: to ask for passes that somebody added there, and for the sources of Triton kernels in a graph.
That takes longer than all else that is done for a graph that is found. Our code depends on none of
it, nor may a key hang on whether Inductor compiled something before: the version of torch is in the
key by name, and graphs with Triton kernels are not kept (`cached.py`).
"""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Iterator
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from torch._functorch._aot_autograd import autograd_cache
from torch._inductor import codecache

_WRAPPER = "torch._inductor.codegen.wrapper"  # which imports most of Inductor
_OF_TRITON = "user_defined_triton_kernel_transitive_closure_source_code"


def _imported(name: str, *rest: Any) -> Any:
    if name == _WRAPPER and name not in sys.modules:
        return SimpleNamespace(**{_OF_TRITON: None})
    return builtins.__import__(name, *rest)


def _short(function: Any) -> Any:
    """A function of torch's that sees other things by some names; torch itself stays as it is."""
    names = {**function.__globals__, "init_backend_registration": lambda: None,
             "custom_backend_passes": {}, "custom_backend_codegen_configs": {},
             "torch_key": lambda: b"", "CacheBase": SimpleNamespace(get_system=dict),
             "__builtins__": {**vars(builtins), "__import__": _imported}}
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__,
                        function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


@contextlib.contextmanager
def short_keys() -> Iterator[None]:
    """Inside, AOTAutograd makes keys for graphs of ours alone."""
    whole = autograd_cache.autograd_cache_key
    details = codecache.FxGraphHashDetails

    def key(*args: Any, **kwargs: Any) -> Any:
        with (patch.object(details, "__init__", _short(details.__init__)),
              patch.object(autograd_cache, "has_triton_package", lambda: False, create=True),
              patch.object(autograd_cache, "_check_triton_cache_version", lambda: None,
                           create=True)):
            return whole(*args, **kwargs)

    with patch.object(autograd_cache, "autograd_cache_key", key):
        yield
