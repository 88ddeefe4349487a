"""A whole model as one executable: what a session runs, and what a .tzx file holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np

from terrazzo.errors import ArtifactError, ModelError
from terrazzo.frontends.onnx.importer import Imported
from terrazzo.frontends.onnx.session.fitting import Fit
from terrazzo.frontends.onnx.session.ports import Port, checked, known_outputs
from terrazzo.graph.ir import TensorType
from terrazzo.index import Index, IndexExpr
from terrazzo.index.guards import Guard
from terrazzo.runtime import fastcall
from terrazzo.runtime.artifact import index_from, model_notes
from terrazzo.runtime.executable import Executable
from terrazzo.runtime.hosted import copied
from terrazzo.runtime.profile import Profile


def notes_of(imported: Imported, types: Mapping[str, TensorType]) -> dict[str, Any]:
    """What has to be known of a model beside its code; `types` are those it was imported with."""
    return model_notes(imported.outputs, [types[name].shape for name in imported.inputs],
                       imported.guards)


class CompiledModel:
    """A model that is one executable, with inputs and outputs by name."""

    def __init__(self, executable: Executable, *, threads: int = 0,
                 profiles: list[Profile] | None = None, records: bool = False):
        notes = executable.artifact.notes
        if "outputs" not in notes:
            raise ArtifactError(f"{executable.name} is an operator, not a model",
                                hint="load it with tz.load")
        self.executable, self.threads, self.profiles = executable, threads, profiles
        # What runs it: by itself, or by repeating what its chip has recorded.
        self.runner = executable.chip.recorded(executable) if records else executable
        self.inputs = tuple(Port(n, t, tuple(map(_size, s)))
                            for n, t, s in executable.input_types)
        self.outputs = tuple(Port(n, t, tuple(map(_size, s))) for n, (t, s) in zip(
            notes["outputs"], executable.output_types, strict=True))
        self.overridable: tuple[Port, ...] = ()
        self.made_with: Mapping[str, Any] = notes.get("made with", {})
        self._fit = Fit(
            {p.name: tuple(map(index_from, s)) for p, s in zip(
                self.inputs, notes["shapes"], strict=True)},
            [Guard(relation, index_from(a), index_from(b)) for relation, a, b in notes["guards"]])
        self.fits = self._fit.fits  # whether sizes keep to what the code assumes of them

    @staticmethod
    def load(path: str | PathLike[str], *, threads: int = 0, profile: bool = False
             ) -> CompiledModel:
        """The model in a .tzx file."""
        return CompiledModel(Executable.load(path), threads=threads,
                             profiles=[] if profile else None)

    def run(self, feeds: Mapping[str, Any], outputs: Sequence[str] | None = None, *,
            into: Mapping[str, np.ndarray] | None = None) -> list[Any]:
        """The outputs, all or those named, for inputs by name."""
        names = known_outputs(outputs, self.outputs)
        values = checked(feeds, self.inputs)
        if not self.fits(values):
            raise ModelError(f"this code is for other sizes: {self._fit.misfit(values)}",
                             hint="a session of the model itself compiles for these too")
        return self.run_checked(values, names, into)

    def run_checked(self, values: Mapping[str, Any], names: Sequence[str],
                    into: Mapping[str, np.ndarray] | None = None) -> list[Any]:
        """The same for inputs that are known to fit."""
        made = [o.name for o in self.outputs]
        results = self.runner.run(
            [values[p.name] for p in self.inputs], threads=self.threads,
            into=[into.get(n) for n in made] if into else (), profiles=self.profiles)
        if list(names) == made:
            return results
        table = dict(zip(made, results, strict=True))
        return [table[n] if n not in names[:i] else copied(table[n]) for i, n in enumerate(names)]

    def again(self, values: Mapping[str, Any], into: Mapping[str, Any]
              ) -> Callable[[], None] | None:
        """What repeats a run on the same memory; None where a run does more than that."""
        if self.profiles is not None or set(into) != {o.name for o in self.outputs} or not (
                self.fits(values)):
            return None
        return self.runner.again([values[p.name] for p in self.inputs],
                                 [into[o.name] for o in self.outputs], self.threads)

    def _repeated(self, numbers: Sequence[int]) -> Callable[[Sequence[Any]], list[Any]]:
        def run(arrays: Sequence[Any]) -> list[Any]:
            results = self.runner.run(arrays)
            return [results[i] for i in numbers]

        return run

    def entry(self, values: Mapping[str, Any], names: Sequence[str], given: Sequence[str]
              ) -> Callable[[Sequence[Any]], list[Any]] | None:
        """The direct way for inputs like these, in the order `given`; None where there is none."""
        arrays = [values[p.name] for p in self.inputs]
        tensors = sum(hasattr(a, "data_ptr") for a in arrays)
        if self.profiles is not None or len(set(names)) < len(names) or not (
                tensors == len(arrays) > 0 or all(type(a) is np.ndarray for a in arrays)):
            return None
        made = [o.name for o in self.outputs]
        numbers = [made.index(n) for n in names]
        direct = fastcall.entry(self.executable, numbers, arrays, self.threads) if (
            self.runner is self.executable) else self._repeated(numbers)
        places = [given.index(p.name) for p in self.inputs]
        if places == list(range(len(given))):
            return direct
        return lambda args: direct([args[i] for i in places])  # others are not read at all


def _size(n: Index) -> Any:
    return str(n) if isinstance(n, IndexExpr) else n
