"""InferenceSession: onnxruntime's methods on a session of ours."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from terrazzo.errors import ModelError, TerrazzoError, UnsupportedOperator
from terrazzo.frontends.onnx.registry import find
from terrazzo.frontends.onnx.session import CompiledModel, Session
from terrazzo.frontends.onnx.session.block import log
from terrazzo.frontends.onnx.session.report import REFERENCE as BY_REFERENCE
from terrazzo.frontends.onnx.session.report import placement
from terrazzo.ort import devices
from terrazzo.ort.metadata import ModelMetadata, NodeArg, with_inferred
from terrazzo.ort.options import LEVELS, RunOptions, SessionOptions
from terrazzo.ort.providers import REFERENCE, gpu, wanted
from terrazzo.ort.values import IOBinding, OrtValue
from terrazzo.runtime.profile import Recording

NO_WAIT = "disable_synchronize_execution_providers"  # of a run
FOLDER = "session.model_external_initializers_file_folder_path"
COMPILED = ".tzx"  # files of models that are compiled already


class InferenceSession:
    """A model, loaded and compiled, with onnxruntime's methods."""

    def __init__(self, path_or_bytes: Any, sess_options: SessionOptions | None = None,
                 providers: Sequence[Any] | None = None,
                 provider_options: Sequence[Mapping[str, Any]] | None = None, **_: Any):
        self._options = (sess_options or SessionOptions())._copied()
        is_path = isinstance(path_or_bytes, (str, os.PathLike))
        self._source = os.fspath(path_or_bytes) if is_path else path_or_bytes
        self._model_path = self._source if is_path else None
        self._model_bytes = None if is_path else path_or_bytes
        self._started = time.time_ns()
        self._session: Session | CompiledModel
        if providers is None and self._options._wanted_providers:
            providers = list(self._options._wanted_providers)
        self._wanted = wanted(providers, provider_options)
        self._make()

    def _make(self) -> None:
        """The session behind this one, for the providers that are wanted."""
        options, source = self._options, self._source
        if isinstance(source, str) and source.endswith(COMPILED):
            self._session = CompiledModel.load(source, threads=options.intra_op_num_threads,
                                               profile=options.enable_profiling)
            return
        self._session = Session(
            with_initializers(source, options._given) if options._given else source,
            folder=self._folder,
            reference=REFERENCE in self._wanted.names,
            threads=options.intra_op_num_threads,
            level=LEVELS[int(options.graph_optimization_level)], sizes=options._sizes,
            profile=options.enable_profiling, chip=self._wanted.chip, records=self._wanted.records)
        refuse_what_cannot_run(self._session)
        tell_of_other_chips(self._session)
        if options.optimized_model_filepath:
            self._session.export(options.optimized_model_filepath)

    @property
    def _folder(self) -> str | None:
        """Where the model's data in other files lies; None: nothing says so."""
        told = self._options._entries.get(FOLDER)
        return told or (os.path.dirname(self._source) if isinstance(self._source, str) else None)

    @property
    def _whole(self) -> CompiledModel | None:
        """The model as one executable, if it is one."""
        session = self._session
        return session if isinstance(session, CompiledModel) else session.whole

    @property
    def _device(self) -> str:
        """The device whose memory a model that is one executable reads and writes."""
        whole = self._whole
        return devices.CPU if whole is None or whole.executable.chip.name != devices.CUDA else (
            devices.CUDA)

    def _wait(self) -> None:
        devices.memory_of(self._device).wait()

    # ------------------------------------------------------------ what the model is
    def get_inputs(self) -> list[NodeArg]:
        session = self._session
        if isinstance(session, CompiledModel):
            return list(map(NodeArg.of_port, session.inputs))
        return [NodeArg(i) for i in session.model.input_infos]

    def get_outputs(self) -> list[NodeArg]:
        return list(self._outputs)

    @cached_property
    def _outputs(self) -> list[NodeArg]:
        session = self._session
        if isinstance(session, CompiledModel):
            return list(map(NodeArg.of_port, session.outputs))
        import onnx

        declared = list(session.model.graph.output)
        try:
            inferred = onnx.shape_inference.infer_shapes(session.model.proto)
        except Exception:  # what it cannot follow stays as declared
            return list(map(NodeArg, declared))
        return list(map(NodeArg, with_inferred(declared, inferred.graph)))

    def get_overridable_initializers(self) -> list[NodeArg]:
        session = self._session
        return [] if isinstance(session, CompiledModel) else [
            NodeArg(i) for i in session.model.overridable_infos]

    def get_modelmeta(self) -> ModelMetadata:
        session = self._session
        if isinstance(session, CompiledModel):
            return ModelMetadata.of_notes(session.executable.name, session.made_with)
        return ModelMetadata(session.model.proto)

    def get_providers(self) -> list[str]:
        return list(self._wanted.names)

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        return self._wanted.answered()

    def get_session_options(self) -> SessionOptions:
        return self._options._copied()

    # ------------------------------------------------------------ running
    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any],
            run_options: RunOptions | None = None) -> list[Any]:
        """The outputs, all or those named."""
        if run_options is not None:
            _stop_if_told(run_options)
        if self._wanted.stream:
            with gpu().on_stream(self._wanted.stream):
                return self._run(output_names, input_feed)
        return self._run(output_names, input_feed)

    def _run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]) -> list[Any]:
        for value in input_feed.values():
            if isinstance(value, OrtValue):
                input_feed = {n: v._array if isinstance(v, OrtValue) else v
                              for n, v in input_feed.items()}
                return [devices.on_host(r) for r in self._session.run(input_feed, output_names)]
        return self._session.run(input_feed, output_names)

    def run_with_ort_values(self, output_names: Sequence[str] | None,
                            input_dict_ort_values: Mapping[str, OrtValue],
                            run_options: RunOptions | None = None) -> list[OrtValue]:
        """The same from and to OrtValues."""
        return [OrtValue(r) for r in self.run(output_names, input_dict_ort_values, run_options)]

    def run_async(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any],
                  callback: Callable[[Any, Any, str], None], user_data: Any,
                  run_options: RunOptions | None = None) -> None:
        """Run in another thread, which calls back with the outputs, or with what went wrong."""
        def work() -> None:
            try:
                results = self.run(output_names, input_feed, run_options)
            except Exception as error:
                callback([], user_data, str(error))
            else:
                callback(results, user_data, "")

        threading.Thread(target=work, name="run_async", daemon=True).start()

    def io_binding(self) -> IOBinding:
        """A fresh binding of inputs and outputs to memory."""
        return IOBinding(self)

    def run_with_iobinding(self, iobinding: IOBinding, run_options: RunOptions | None = None
                           ) -> None:
        """Run on what is bound, and wait for it unless told not to."""
        _stop_if_told(run_options)
        with gpu().on_stream(self._wanted.stream) if self._wanted.stream else nullcontext():
            iobinding._run(self._device)
            if run_options is None or run_options._entries.get(NO_WAIT) != "1":
                self._wait()

    # ------------------------------------------------------------ providers
    def set_providers(self, providers: Sequence[Any] | None = None,
                      provider_options: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Compile again, for other providers."""
        before, self._wanted = self._wanted, wanted(providers, provider_options)
        if self._wanted != before:
            self._make()

    def enable_fallback(self) -> None:
        """Accepted: there is one provider to fall back to, and it runs everything."""

    def disable_fallback(self) -> None:
        """Accepted, for the same reason."""

    def get_tuning_results(self) -> list[Any]:
        """None: kernels are chosen when a model is compiled."""
        return []

    def set_tuning_results(self, results: Sequence[Any], *, error_on_invalid: bool = False) -> None:
        """Accepted, for the same reason."""

    def set_ep_dynamic_options(self, options: Mapping[str, str]) -> None:
        """Accepted: the CPU provider has none."""

    # ------------------------------------------------------------ profiling
    def get_profiling_start_time_ns(self) -> int:
        return self._started

    def end_profiling(self) -> str:
        """Write what was recorded as a list of events (it opens in Perfetto); answers its path."""
        profiles = self._session.profiles
        if profiles is None:
            return ""
        start = f"{self._options.profile_file_prefix}_{time.strftime('%Y-%m-%d_%H-%M-%S')}"
        for number in itertools.count():  # several may end in one second
            path = Path(os.getcwd()) / f"{start}_{number}.json"
            with suppress(FileExistsError), path.open("x") as file:
                json.dump(Recording(list(profiles)).events(), file)
                break
        profiles.clear()
        return str(path)


def _stop_if_told(options: RunOptions | None) -> None:
    if options is not None and options.terminate:
        raise TerrazzoError("this run was told to terminate", hint="set terminate to False")


def tell_of_other_chips(session: Session) -> None:
    """Say which kernels the chip leaves to the CPU."""
    left = session.elsewhere
    if left:
        told = "; ".join(f"{origin} ({why})" for origin, why in left[:4])
        log.warning("%d kernels of the model run on the CPU, on copies: %s%s", len(left), told,
                    "; ..." if len(left) > 4 else "")


def refuse_what_cannot_run(session: Session) -> None:
    """Raise for a node that nothing here runs, before anybody waits for a run to find that out."""
    if session.whole is not None:
        return
    for node, placed in zip(session.model.graph.node, placement(session), strict=True):
        domain = "" if node.domain == "ai.onnx" else node.domain
        version = session.model.opsets.get(domain, 1)
        if placed.where != BY_REFERENCE or find(domain, node.op_type, version) is not None:
            continue  # with a converter, the sizes of a call may be what it needs
        if not session.setting.reference or not _has_schema(node, session.model.opsets):
            raise UnsupportedOperator(f"{placed.node} cannot run here: {placed.why}",
                                  where=session.model.where or None)


def _has_schema(node: Any, opsets: Mapping[str, int]) -> bool:
    from onnx import defs

    domain = "" if node.domain == "ai.onnx" else node.domain
    try:
        return bool(defs.get_schema(node.op_type, opsets.get(domain, 1), domain))
    except defs.SchemaError:
        return False


def with_initializers(source: Any, given: Mapping[str, OrtValue]) -> Any:
    """A model with some of its initialisers replaced; others may still lie in other files."""
    import onnx
    from onnx import numpy_helper

    is_path = isinstance(source, (str, os.PathLike))
    proto = onnx.load_model(source, load_external_data=False) if is_path else (
        onnx.ModelProto.FromString(bytes(source)))
    known = {t.name: t for t in proto.graph.initializer}
    for name, value in given.items():
        if name not in known:
            raise ModelError(f"the model has no initialiser {name!r} to replace")
        array: np.ndarray = value.numpy()
        if list(known[name].dims) != list(array.shape):
            raise ModelError(f"the initialiser {name!r} has shape {list(known[name].dims)}, "
                             f"given is {list(array.shape)}")
        known[name].CopyFrom(numpy_helper.from_array(array, name))
    return proto
