"""A session: one model, loaded and compiled, ready to be run from any thread."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from terrazzo.compiler.driver import compile_graph
from terrazzo.compiler.keys import load_compiled, model_key
from terrazzo.compiler.lowering import Lowering
from terrazzo.compiler.options import Options
from terrazzo.compiler.rewriting import inlined
from terrazzo.errors import CompileError, TerrazzoError, UnsupportedOperator
from terrazzo.frontends.onnx import convert, registry
from terrazzo.frontends.onnx.export import export
from terrazzo.frontends.onnx.importer import Imported, import_nodes
from terrazzo.frontends.onnx.model import Model, fix_sizes, load_model
from terrazzo.frontends.onnx.session.block import Block, Setting, Visit, log
from terrazzo.frontends.onnx.session.compiled import CompiledModel, notes_of
from terrazzo.frontends.onnx.session.ports import Port, checked, known_outputs, ports_of
from terrazzo.frontends.onnx.session.route import entry_of
from terrazzo.frontends.onnx.sizes import declared_types
from terrazzo.graph.ir import TensorType
from terrazzo.index import IndexExpr
from terrazzo.runtime import fastcall
from terrazzo.runtime.content import is_ours
from terrazzo.runtime.executable import Executable
from terrazzo.runtime.hosted import to_numpy
from terrazzo.runtime.profile import Profile

assert convert  # importing it registers the converters
_WORTH_COLLECTING = 1 << 24  # bytes of weights: looking for what nobody needs takes 25 ms


class Session:
    """A model that runs: `run(feeds)` answers its outputs in order."""

    def __init__(self, source: Any, *, reference: bool = True, compile_now: bool = True,
                 threads: int = 0, level: str = "", sizes: Mapping[str, int] | None = None,
                 profile: bool = False, chip: str = "", records: bool = False,
                 folder: str | PathLike[str] | None = None):
        """Load a model and, unless told otherwise, compile it at once where its types allow.

        `reference` says whether onnx's reference may run what nothing else can; `threads` and
        `level` (of rewrites) and `chip` are the knobs' where not given; `sizes` fixes symbolic
        dimensions; `records` has the chip repeat what it recorded of earlier runs, if it can;
        `folder` is where data in other files lies, beside the model's file by default.
        """
        self.model: Model = load_model(source, folder)
        self.threads, self.options = threads, Options.now(level, chip)
        self.sizes, self.records = dict(sizes or {}), records
        self.profiles: list[Profile] | None = [] if profile else None
        graph = self.model.graph
        fix_sizes(graph, self.sizes)
        self.ports = ports_of(self.model)
        self.setting = Setting(self.model.opsets, self._compile, reference, self.model.where,
                               self._caller)
        self.compilations = 0  # parts that were compiled, or taken from the cache one by one
        self.block = Block(list(graph.node), self.model.weights, [o.name for o in graph.output],
                           self.setting, graph.name or "model", self.types)
        self.whole: CompiledModel | None = None
        self._entries: dict[Any, Callable[[Sequence[Any]], list[Any]]] = {}
        if compile_now:
            executable = self._compile_whole()
            if executable is not None:
                self.whole = CompiledModel(executable, threads=threads, profiles=self.profiles,
                                           records=records)

    @property
    def inputs(self) -> tuple[Port, ...]:
        """What `run` takes."""
        return self.ports.inputs

    @property
    def elsewhere(self) -> list[tuple[str, str]]:
        """Kernels of the model that its chip leaves to another one, and why, as far as known."""
        return [] if self.whole is None else [
            (row["origin"], row["elsewhere"]) for row in self.whole.executable.artifact.kernels
            if "elsewhere" in row]

    @property
    def overridable(self) -> tuple[Port, ...]:
        """Weights that `run` takes as well, in place of the model's own."""
        return self.ports.overridable

    @property
    def outputs(self) -> tuple[Port, ...]:
        """What `run` answers."""
        return self.ports.outputs

    def _compile(self, imported: Imported, key: str = "", notes: Mapping[str, Any] | None = None
                 ) -> Any:
        self.compilations += 1
        graph = imported.graph
        try:
            return compile_graph(graph, key=key, notes=notes, options=self.options,
                                 reaches=imported.reaches)
        except (TerrazzoError, KeyboardInterrupt):
            raise
        except Exception as error:
            raise CompileError(
                f"compiling {graph.name} failed inside terrazzo: {type(error).__name__}: "
                f"{error}", where=self.model.where,
                hint="this is a mistake of ours, or of the model; please report it") from error

    def _caller(self, executable: Any) -> Callable[[Sequence[Any]], list[Any]]:
        """How a compiled part runs: with this session's threads, recorded where that is wanted."""
        if not isinstance(executable, Executable):
            run: Callable[[Sequence[Any]], list[Any]] = executable.run
            return run
        if self.profiles is not None:
            return partial(executable.run, threads=self.threads, profiles=self.profiles)
        if self.records:
            repeated: Callable[[Sequence[Any]], list[Any]] = (
                executable.chip.recorded(executable).run)
            return repeated
        return fastcall.Remembering(executable, self.threads)

    # ------------------------------------------------------------ before the first run
    @cached_property
    def imported(self) -> Imported | None:
        """The whole model as one graph by its declared types; None where those say too little."""
        if any(p.name not in self.types for p in self.inputs):
            return None
        return import_nodes(list(enumerate(self.model.graph.node)), self.model.opsets, self.types,
                            self.model.weights, [o.name for o in self.outputs],
                            self.model.graph.name or "model", self.model.where)

    @cached_property
    def types(self) -> dict[str, TensorType]:
        """The declared types of the inputs that have one."""
        return declared_types({p.name: (p.dtype, p.shape) for p in self.inputs
                               if p.dtype is not None and p.shape is not None}, self.sizes)

    def _compile_whole(self) -> Executable | None:
        """The model as one executable, from the cache if it was compiled before."""
        # A model's digest does not tell what a user's operator computes; its graph does.
        key = "" if _uses_foreign(self.model) else model_key(
            self.options, self.model.digest, str(sorted(self.sizes.items())))
        known = None if self.options.settings.dump else load_compiled(key, self.options)
        if known is not None:
            return known
        with self.options.chip.compiling_elsewhere():
            imported = self.imported
            if imported is None or imported.put_off or set(imported.outputs) != {
                    o.name for o in self.outputs}:
                return None
            try:
                made = self._compile(imported, key, notes_of(imported, self.types))
            except TerrazzoError as error:
                if not any(isinstance(n, IndexExpr) for v in imported.graph.inputs
                           for n in v.shape):
                    raise
                log.warning("the model is compiled for each size it meets: %s", error.message)
                return None
        self.model.release()
        if sum(w.nbytes for w in self.model.weights.values()) > _WORTH_COLLECTING:
            gc.collect()  # graphs hold each other in circles, with them weights that were merged
        return made if isinstance(made, Executable) else None

    def export(self, path: str | PathLike[str]) -> None:
        """Write the graph after all rewrites of this session's level as an ONNX model."""
        imported = self.imported
        if imported is None or imported.put_off:
            raise UnsupportedOperator("only a model that compiles as a whole can be written",
                                      where=self.model.where, hint="see tz info")
        graph = Lowering(inlined(imported.graph, options=self.options), self.options.chip,
                         options=self.options).graph
        Path(path).write_bytes(export(graph, imported.outputs).SerializeToString())

    # ------------------------------------------------------------ running
    def run(self, feeds: Mapping[str, Any], outputs: Sequence[str] | None = None, *,
            into: Mapping[str, np.ndarray] | None = None) -> list[Any]:
        """The model's outputs, all or those named, for inputs by name.

        `into` holds memory to write outputs to, by name.
        """
        # Inputs like those of an earlier run need no second look.
        ports = self.ports
        inputs = ports.names
        args = [feeds.get(n) for n in inputs]
        key: Any = None if into is not None or len(feeds) != len(args) else fastcall.key_of(
            args if ports.tensors is inputs else [feeds.get(n) for n in ports.tensors])
        if outputs is not None and key is not None:
            key = (key, *outputs)
        entry = self._entries.get(key)
        if entry is not None:
            return entry(args)
        names = known_outputs(outputs, ports.outputs)
        values = checked(feeds, ports.inputs, ports.overridable)
        whole = self.whole
        if whole is not None and whole.fits(values) and not any(
                p.name in values for p in ports.overridable):
            results = whole.run_checked(values, names, into)
            if key is not None:
                self._remember(key, whole.entry(values, names, inputs))
            return results
        memory = self.options.chip.memory
        away = [n for n, a in values.items() if hasattr(a, "data_ptr") and not a.is_cpu]
        if away:  # what lies between parts that are compiled is the host's
            values.update({n: to_numpy(memory.to_host(values[n])) for n in away})
        trail: list[Visit] = []
        found = self.block.run(values, names, own=True, trail=trail)
        if key is not None and self.profiles is None and all(
                values[n] is a for n, a in zip(inputs, args, strict=True)):
            self._remember(key, entry_of(self.block, inputs, names, trail))
        for i, name in enumerate(names):
            if into and name in into:
                into[name][...] = found[i]
                found[i] = into[name]
        return found

    def _remember(self, key: Any, entry: Callable[[Sequence[Any]], list[Any]] | None) -> None:
        if entry is not None:
            if len(self._entries) >= fastcall.MOST_ENTRIES:
                self._entries.clear()
            self._entries[key] = entry


def _uses_foreign(model: Model) -> bool:
    """Whether any node of a model may be converted by what is not in our sources."""
    foreign = {domain for domain, _, function in registry.converters() if not is_ours(function)}
    # Functions of ONNX itself are made of operators of its own domain, whatever a model names.
    return bool(foreign) and ("" in foreign or not foreign.isdisjoint(_domains(model.graph)))


def _domains(graph: Any) -> set[str]:
    inner = [g for n in graph.node for a in n.attribute
             for g in ((a.g,) if a.HasField("g") else a.graphs)]
    return {n.domain for n in graph.node}.union(*map(_domains, inner))
