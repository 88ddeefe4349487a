"""Programs that AOTAutograd keeps on disk, so that another process need not trace the graph again.

Torch finds an entry by the graph that dynamo captured, the layout of its inputs and its own
settings; what compiled code depends on besides is added to that key (`key_tag`). Kept are graphs
with fixed sizes, forward and backward passes together. Others are traced again, and their segments
found by their own keys (`compiler/keys.py`); so are those whose code hangs on what the key does not
tell: frozen parameters, constants in the module, operators and rules of the user's.

What makes code is not imported here: a process that finds its graphs takes none of it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._inductor.output_code import OutputCode
from torch.fx import GraphModule

from terrazzo.compiler.keys import settings_key
from terrazzo.knobs import knobs
from terrazzo.runtime import artifact as artifacts
from terrazzo.runtime.executable import Executable
from terrazzo.torch.aot_key import short_keys
from terrazzo.torch.entry import (
    Result,
    Source,
    entry,
    held,
    laid,
    laid_in_order,
    made_function,
    reinterpret,
)
from terrazzo.torch.options import BackendOptions

if TYPE_CHECKING:
    from terrazzo.torch.program import Program
    from terrazzo.torch.segment import Segment

OF_TORCH = ("aten", "prims", "prim", "terrazzo")  # operators whose meaning a version fixes
HIGHER_ORDER = ("run_and_save_rng_state", "run_with_rng_state")  # of checkpointing: plain calls
TRITON = "triton_kernel_wrapper"
HELPERS = {"laid": laid, "laid in order": laid_in_order, "held": held, "view": reinterpret}
PLAIN = (int, float, bool, str, tuple, type(None), torch.dtype, torch.device, torch.layout,
         torch.memory_format)


# ---------------------------------------------------------------- what may be kept
def key_tag(gm: GraphModule, options: BackendOptions) -> str:
    """What code for a graph depends on besides the graph; empty where that cannot be told."""
    settings = knobs.now
    if options.freeze or not settings.cache or not _tells_all(gm):
        return ""
    return settings_key(settings, "torch.compile", torch.__version__,
                        str(torch.version.git_version), str(options))


def _tells_all(gm: GraphModule) -> bool:
    """Whether the text of a graph says all that it computes."""
    if _has_rules() or any(name.partition(".")[0] in OF_TORCH for name in _converters()):
        return False
    return all(_is_known(node, module) for module in gm.modules()
               if isinstance(module, GraphModule) for node in module.graph.nodes)


def _has_rules() -> bool:
    """Whether there are rules of the user's, who loads a module to make one."""
    rewrite = sys.modules.get("terrazzo.graph.rewrite")
    return rewrite is not None and bool(rewrite.user_rules())


def _converters() -> set[str]:
    """The converters of the user's, likewise."""
    aten = sys.modules.get("terrazzo.torch.aten")
    return set() if aten is None else set(aten.CONVERTERS) - aten.OURS


def _is_known(node: Any, module: GraphModule) -> bool:
    if node.op == "get_attr":  # the text does not tell a tensor's elements
        return isinstance(getattr(module, str(node.target), None), GraphModule)
    if node.op == "call_function" and isinstance(
            node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(node.target).partition(".")[0] in OF_TORCH
    return not str(node.target).startswith(TRITON)  # whose sources the key does not tell


@contextlib.contextmanager
def kept(tag: str) -> Iterator[None]:
    """Inside, AOTAutograd looks into its cache, and keeps what our compiler makes."""
    settings = torch.compiler.config
    with (short_keys(), torch._functorch.config.patch(bundled_autograd_cache=True),
          settings.patch(cache_key_tag=f"{settings.cache_key_tag} terrazzo {tag}")):
        yield


def serializable(compiler: Callable[..., Program]) -> SerializableAOTDispatchCompiler:
    """A compiler whose results AOTAutograd may keep."""

    def kept_program(gm: GraphModule, example_inputs: Sequence[Any]) -> Kept:
        made = Kept(compiler(gm, example_inputs))
        if not torch._functorch.config.bundled_autograd_cache:
            made.keep_before_first_run()
        return made

    return SerializableAOTDispatchCompiler(Kept, kept_program)


# ---------------------------------------------------------------- what is kept
@dataclass(frozen=True)
class StoredSegment:
    """Code of a segment for fixed sizes, and how its results and arguments lie."""

    code: bytes
    made: tuple[Result, ...]
    sources: tuple[Source, ...]
    threads: int

    def loaded(self) -> Callable[..., Sequence[Any]]:
        executable = Executable(artifacts.unpack(self.code))
        return entry(executable, self.made, self.sources, (), self.threads)


@dataclass(frozen=True)
class Named:
    """An object that every process finds by its name."""

    kind: str
    name: str = ""

    def found(self) -> Any:
        if self.kind == "higher order":
            return getattr(torch.ops.higher_order, self.name)
        if self.kind == "operator":
            space, name, overload = self.name.split(".")
            if space == "terrazzo":
                import_module("terrazzo.torch.ours")
            return getattr(getattr(getattr(torch.ops, space), name), overload)
        return HELPERS[self.kind]


class Kept(OutputCode):
    """A program as AOTAutograd holds it, and writes it to disk."""

    def __init__(self, program: Program):
        self._boxed_call = True  # torch's wrappers look for it here, not in the class
        self.program: Program | None = program
        self.run = program.run
        self.stored: tuple[str, str, Mapping[str, Any]] | None = None  # name, source, scope

    @property
    def _fx_graph_cache_key(self) -> str | None:
        """Torch asks whether there is such an entry: there never is, code is kept with the rest."""
        raise AttributeError("_fx_graph_cache_key")

    def __call__(self, inputs: Any) -> Any:
        return self.run(inputs)

    def keep_before_first_run(self) -> None:
        """Let torch keep both passes when it has this one, the backward pass, and then runs it.

        It is compiled when it is first wanted, long after `kept` has ended. Torch's settings are
        those of a thread, and what they are until the run only says in which form entries are kept.
        """
        torch._functorch.config.bundled_autograd_cache = True
        run = self.run

        def first(inputs: Any) -> Any:
            torch._functorch.config.bundled_autograd_cache = False
            self.run = run
            return run(inputs)

        self.run = first

    def prepare_for_serialization(self) -> None:
        """Leave what can be written; torch calls this on a copy."""
        assert self.program is not None
        self.stored = (self.program.name, self.program.source, stored_scope(self.program))
        del self.run
        self.program = None

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """Make the function again after loading."""
        assert self.stored is not None
        name, source, scope = self.stored
        with torch.utils._python_dispatch._disable_current_modes():
            self.run = made_function(name, source, {k: _loaded(v) for k, v in scope.items()})

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """There is none."""


def _loaded(value: Any) -> Any:
    if isinstance(value, StoredSegment):
        return value.loaded()
    return value.found() if isinstance(value, Named) else value


def stored_scope(program: Program) -> dict[str, Any]:
    """What the function of a program names, in a form that can be written."""
    segments = {f"segment{i}": s for i, s in enumerate(program.segments)}
    return {name: _stored_segment(segments[name]) if name in segments else _stored(value)
            for name, value in program.scope.items()}


def _stored(value: Any) -> Any:
    if isinstance(value, torch._ops.OpOverload) and str(value).partition(".")[0] in OF_TORCH:
        return Named("operator", str(value))
    if str(value) in HIGHER_ORDER:
        return Named("higher order", str(value))
    for kind, helper in HELPERS.items():
        if value is helper:
            return Named(kind)
    if isinstance(value, PLAIN):
        return value
    raise BypassAOTAutogradCache(f"terrazzo does not keep {value!r:.80}")


def _stored_segment(segment: Segment) -> StoredSegment:
    from terrazzo.torch.segment import results

    if segment.piece.symbols or len(segment.variants) != 1:
        raise BypassAOTAutogradCache("terrazzo does not keep sizes that vary")
    variant = segment.variants[0]
    if not isinstance(variant.executable, Executable):
        raise BypassAOTAutogradCache("terrazzo does not keep what the host takes part in")
    return StoredSegment(artifacts.pack(variant.executable.artifact), tuple(results(
        segment.piece, {})), tuple(segment.sources(variant, {})), segment.threads)
