"""Programs that AOTAutograd keeps on disk, so that another process need not trace the graph again.

Torch finds an entry by the graph that dynamo captured, the layout of its inputs and its own
settings; what compiled code depends on besides is added to that key (`key_tag`). Kept are forward
and backward passes together. What code for sizes that vary relies on, torch is told to guard; where
it cannot be told, or sizes hang on data, or code on what the key does not tell (frozen parameters,
constants in the module, operators and rules of the user's), a graph is traced again, and its
segments are found by their own keys (`compiler/keys.py`).

What makes code is not imported here: a process that finds its graphs takes none of it.
"""

from __future__ import annotations

import contextlib
import math
import operator
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
from terrazzo.errors import ShapeError
from terrazzo.index.guards import Guard
from terrazzo.knobs import knobs
from terrazzo.runtime import artifact as artifacts
from terrazzo.runtime.executable import Executable
from terrazzo.torch.aot_key import short_keys
from terrazzo.torch.entry import (
    Result,
    Source,
    as_saved,
    entry,
    held,
    laid,
    laid_in_order,
    made_function,
    reinterpret,
    rows,
)
from terrazzo.torch.options import BackendOptions

if TYPE_CHECKING:
    from terrazzo.torch.program import Program
    from terrazzo.torch.segment import Segment

OF_TORCH = ("aten", "prims", "prim", "terrazzo")  # operators whose meaning a version fixes
HIGHER_ORDER = ("run_and_save_rng_state", "run_with_rng_state")  # of checkpointing: plain calls
TRITON = "triton_kernel_wrapper"
HELPERS = {"laid": laid, "laid in order": laid_in_order, "held": held,
           "as saved": as_saved, "view": reinterpret}
ARITHMETIC = {"python": operator, "math": math, "torch": torch}  # what sizes are computed with
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
        program = compiler(gm, example_inputs)
        made = Kept(program)
        if not torch._functorch.config.bundled_autograd_cache:
            made.keep_before_first_run()
            return made
        for segment in program.segments:  # torch makes its guards after this
            _is_guarded(segment, tell=True)
        return made

    return SerializableAOTDispatchCompiler(Kept, kept_program)


# ---------------------------------------------------------------- what is kept
@dataclass(frozen=True)
class StoredSegment:
    """Code of a segment, and how its results and arguments lie."""

    code: bytes
    made: tuple[Result, ...]
    sources: tuple[Source, ...]
    threads: int
    symbols: tuple[str, ...]  # that sizes are made of, in the order in which a call names them
    extra: tuple[str, ...]  # of these, those that come as rows after the sources
    guards: tuple[Guard, ...]

    def loaded(self) -> Callable[..., Sequence[Any]]:
        executable = Executable(artifacts.unpack(self.code))
        if self.symbols:
            return LoadedSegment(self, executable)
        return entry(executable, self.made, self.sources, (), self.threads)


class LoadedSegment:
    """Code for sizes that vary, called with their values and tensors."""

    def __init__(self, stored: StoredSegment, executable: Executable):
        self.stored, self.executable = stored, executable
        self.runs: dict[tuple[int, ...], Callable[..., Sequence[Any]]] = {}

    def __call__(self, sizes: tuple[int, ...], *tensors: Any) -> Sequence[Any]:
        run = self.runs.get(sizes)
        if run is None:
            run = self.runs[sizes] = self.entry(sizes)
        return run(*tensors)

    def entry(self, sizes: tuple[int, ...]) -> Callable[..., Sequence[Any]]:
        """What calls with these sizes run."""
        stored = self.stored
        numbers = dict(zip(stored.symbols, sizes, strict=True))
        broken = next((g for g in stored.guards if not g.holds(numbers)), None)
        if broken is not None:
            raise ShapeError(f"what torch's cache had is for sizes with {broken}, not {numbers}")
        return entry(self.executable, [r.sized(numbers) for r in stored.made],
                     [*stored.sources, *rows(stored.extra, numbers)],
                     [numbers[d.name] for d in self.executable.dims], stored.threads)


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
        if self.kind in ARITHMETIC:
            return getattr(ARITHMETIC[self.kind], self.name)
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
    for kind, module in ARITHMETIC.items():
        name = getattr(value, "__name__", "")
        if callable(value) and name and getattr(module, name, None) is value:
            return Named(kind, name)
    for kind, helper in HELPERS.items():
        if value is helper:
            return Named(kind)
    if isinstance(value, PLAIN):
        return value
    raise BypassAOTAutogradCache(f"terrazzo does not keep {value!r:.80}")


def _stored_segment(segment: Segment) -> StoredSegment:
    from terrazzo.torch.segment import results
    from terrazzo.torch.symbols import variable

    piece = segment.piece
    if len(segment.variants) != 1 or not _is_guarded(segment, tell=False):
        raise BypassAOTAutogradCache("terrazzo does not keep code for some sizes of all")
    variant = segment.variants[0]
    if not isinstance(variant.executable, Executable):
        raise BypassAOTAutogradCache("terrazzo does not keep what the host takes part in")
    names = {name: variable(name) for name in piece.symbols}
    return StoredSegment(
        artifacts.pack(variant.executable.artifact), tuple(results(piece, names)),
        tuple(segment.sources(variant)), segment.threads, piece.symbols, variant.extra,
        variant.guards)


def _is_guarded(segment: Segment, tell: bool) -> bool:
    """Whether a segment's code is for all sizes that torch lets through."""
    from terrazzo.torch.segment import symbolic_sizes
    from terrazzo.torch.symbols import known_to_torch

    piece = segment.piece
    if not piece.symbols:
        return True
    return not piece.unbacked and len(segment.variants) == 1 and known_to_torch(
        segment.variants[0].guards, symbolic_sizes([*piece.nodes, *piece.inputs]), tell)
