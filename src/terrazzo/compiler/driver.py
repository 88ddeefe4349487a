"""The way down on the chip that is handed in: from a graph to an Executable."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from terrazzo.base import progress
from terrazzo.chips.chip import Chip
from terrazzo.chips.memory import HOST
from terrazzo.compiler.keys import graph_key, kept_key, load_compiled
from terrazzo.compiler.levels import WHOLE, graph_level, level_text
from terrazzo.compiler.lowering import Lowering
from terrazzo.compiler.options import Options
from terrazzo.compiler.rewriting import inlined
from terrazzo.errors import ArtifactError, CompileError
from terrazzo.graph.ir import Graph, Value
from terrazzo.index import Index
from terrazzo.runtime import artifact as artifacts
from terrazzo.runtime.artifact import Artifact, Over, Strides
from terrazzo.runtime.cache import default_cache
from terrazzo.runtime.executable import Executable

if TYPE_CHECKING:
    from terrazzo.graph.reach import Reach


def compile_graph(graph: Graph, chip: Chip | None = None, strides: Strides = (),
                  over: Over = (), *, key: str = "", notes: Mapping[str, Any] | None = None,
                  options: Options | None = None, reaches: Sequence[Reach] = ()) -> Any:
    """An executable for a graph, from the disk cache when it was compiled before.

    `strides` are those of inputs that are not row major, in elements, None for the others. Which
    of them the executable takes is for it to say; the rest must be made row major. In the same way
    `over` asks for outputs to be written over inputs, by their numbers. `key` names
    the graph for `load_compiled`, by default by its contents; `notes` are kept with the code.
    Indices that step outside of their `reaches` are an error of the run, on chips whose memory is
    the host's: elsewhere looking would wait for the device. A compilation that takes long shows a
    bar on the terminal.
    """
    with progress.shown(graph.name):
        return _compiled(graph, chip, strides, over, key, notes, options, reaches)


def _compiled(graph: Graph, chip: Chip | None, strides: Strides, over: Over, key: str,
              notes: Mapping[str, Any] | None, options: Options | None,
              reaches: Sequence[Reach]) -> Any:
    from terrazzo.runtime.hosted import HostedExecutable, needs_host

    options = options or Options.now()
    chip = chip or options.chip
    progress.doing("rewriting")
    declared = graph
    looks = bool(reaches) and chip.memory is HOST
    if looks:
        from terrazzo.graph.reach import outside

        graph = Graph(graph.name, graph.inputs, (*graph.outputs, outside(reaches)))
        notes = {**(notes or {}), **artifacts.reach_notes(reaches)}
    strides = tuple(_real_strides(s, v) for s, v in zip(strides, graph.inputs))
    graph = inlined(graph, options=options)  # a composite operator's name does not tell its body
    controlled = needs_host(graph)
    if controlled:  # what is compiled without it is compiled sooner
        from terrazzo.compiler.control_flow import ControlLowering, is_native

        for level in _dumped(options):
            if is_native(graph) or level in WHOLE:  # parts that the host calls show themselves
                print(graph_level(graph, level, options, chip))
        if not is_native(graph):
            return HostedExecutable(graph, partial(compile_graph, chip=chip, options=options),
                                    declared, (notes or {}).get("reaches", ()))
    lowering = Lowering(graph, chip, strides, options, is_inlined=True, over=over,
                        keeps_last=looks)
    if not controlled:
        for level in _dumped(options):
            print(level_text(lowering, level))
    key = key or graph_key(lowering, {**(notes or {}), **_complex_note(declared)})
    known = load_compiled(key, options, chip)
    if known is not None:
        return known
    made = ControlLowering(graph, chip, options, looks) if controlled else lowering
    with _enough_files(graph.name):
        artifact = replace(_as_declared(made.artifact(), declared), notes=dict(notes or {}))
    key = kept_key(key, options.settings, chip, artifact.made.facts.get("choices", {}))
    stored = default_cache(options.settings).store(key, partial(artifacts.write, artifact)) if (
        key) else None
    if stored is not None and artifact.constants:
        # What is mapped from the file need not be packed into memory once more.
        with contextlib.suppress(OSError, ArtifactError):
            artifact = artifacts.load(stored, remember=True)
    return Executable(artifact)


# Complex numbers lie in memory as pairs of real ones, which is how kernels see them; who calls an
# executable sees the types of the graph.
def _real_strides(strides: tuple[Index, ...] | None, value: Value) -> tuple[Index, ...] | None:
    if strides is None or not value.dtype.is_complex:
        return strides
    return (*(2 * s for s in strides), 1)


def _complex_note(graph: Graph) -> dict[str, str]:
    """Tells graphs apart that differ in the types at their edge alone."""
    types = [v.dtype for v in (*graph.inputs, *graph.outputs)]
    return {"types": " ".join(t.name for t in types)} if any(t.is_complex for t in types) else {}


def _as_declared(artifact: Artifact, graph: Graph) -> Artifact:
    strides = artifact.strides and tuple(
        s if s is None or not v.dtype.is_complex else tuple(n // 2 for n in s[:-1])
        for s, v in zip(artifact.strides, graph.inputs, strict=True))
    return replace(
        artifact, strides=strides,
        inputs=tuple((name, v.dtype.name, v.shape) for (name, _, _), v in zip(
            artifact.inputs, graph.inputs, strict=True)),
        outputs=tuple((v.dtype.name, v.shape) for v in graph.outputs))


@contextlib.contextmanager
def _enough_files(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # importing a module of ours may be what fails
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise CompileError(f"compiling {name} opens files, and there are too many open files",
                           hint="close some, or raise the limit (ulimit -n)") from error


def _dumped(options: Options) -> Iterator[str]:
    """The levels that are to be printed, whether what is compiled is in the cache or not."""
    return filter(None, options.settings.dump.split(","))
