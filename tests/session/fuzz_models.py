"""Model files changed at random: a session answers, or says what is wrong, and never dies.

    python tests/session/fuzz_models.py --mutants 5000 [--seed 0] [--jobs 2]

Each mutant is loaded, compiled and run in a worker process with limited memory and time. Good ends
are a result and an error of terrazzo's. Everything else counts as a failure and is written to a
file: another exception, a crash, a time-out.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import functools
import multiprocessing
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper

sys.path.insert(0, str(Path(__file__).parents[1] / "frontends" / "onnx"))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from models import model, node
from onnx_models import bert, resnet

MEMORY = 6 << 30  # bytes of address space a worker may have, the interpreter included
SECONDS = 60  # for one mutant
# Elements; a mutant that asks for more is only loaded: it might run for minutes, and rightly so.
LARGEST_INPUT = 1 << 18


# ---------------------------------------------------------------- what is mutated
def _weights(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {n: rng.standard_normal(s, np.float32) for n, s in shapes.items()}


def _branch(op: str) -> Any:
    return helper.make_graph([helper.make_node(op, ["x"], ["r"])], op, [],
                             [helper.make_tensor_value_info("r", TensorProto.FLOAT, None)])


def _info(name: str, kind: int, shape: Any = ()) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def _bodies() -> tuple[Any, Any]:
    """The body of a Loop that doubles and of a Scan that sums."""
    kind, flag = TensorProto.FLOAT, TensorProto.BOOL
    doubling = helper.make_graph(
        [node("Add", "a a", "b"), node("Identity", "c", "d"), node("Mul", "b b", "square")],
        "doubling", [_info("i", TensorProto.INT64), _info("c", flag), _info("a", kind, (4,))],
        [_info("d", flag), _info("b", kind, (4,)), _info("square", kind, (4,))])
    summing = helper.make_graph(
        [node("Add", "s v", "t"), node("Identity", "t", "u")], "summing",
        [_info("s", kind, (4,)), _info("v", kind, (4,))],
        [_info("t", kind, (4,)), _info("u", kind, (4,))])
    return doubling, summing


@functools.cache
def seeds() -> list[ModelProto]:
    """Small models that between them use most of the front end."""
    i64 = TensorProto.INT64
    axes, shape = np.array([2, 3]), np.array([0, -1])
    convolution = model(
        [node("Conv", "x w b", "c", pads=[1, 1, 1, 1], strides=[2, 2]), node("Relu", "c", "r"),
         node("BatchNormalization", "r s s s v", "n"),
         node("MaxPool", "n", "p", kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1),
         node("Resize", "p _ scales", "z", mode="nearest"), node("ReduceMean", "z axes", "m"),
         node("Reshape", "m shape", "f"), node("Gemm", "f g", "y", transB=1)],
        {"x": (1, 3, 12, 12)}, ["y"],
        {**_weights(w=(4, 3, 3, 3), b=(4,), s=(4,), g=(5, 4)), "v": np.ones(4, np.float32),
         "axes": axes, "shape": shape, "scales": np.float32([1, 1, 2, 2])})
    attention = model(
        [node("LayerNormalization", "x s b", "n"), node("MatMul", "n w", "h"),
         node("Split", "h", "q k v", axis=2, num_outputs=3),
         node("Transpose", "k", "t", perm=[0, 2, 1]), node("MatMul", "q t", "a"),
         node("Softmax", "a", "p"), node("MatMul", "p v", "o"), node("Gelu", "o", "e"),
         node("Add", "x e", "y")],
        {"x": ("batch", 5, 8)}, ["y"], _weights(w=(8, 24), s=(8,), b=(8,)))
    recurrent = model(
        [node("LSTM", "x w r", "y h c", hidden_size=4),
         node("GRU", "x wg rg", "z", hidden_size=4, linear_before_reset=1)],
        {"x": (3, 2, 5)}, ["y", "h", "z"],
        _weights(w=(1, 16, 5), r=(1, 16, 4), wg=(1, 12, 5), rg=(1, 12, 4)))
    control = model(
        [node("Shape", "x", "s"), node("Gather", "s zero", "d"),
         node("Greater", "d zero", "more"),
         node("If", "more", "i", then_branch=_branch("Exp"), else_branch=_branch("Neg")),
         node("NonZero", "i", "places"), node("TopK", "i k", "values which", axis=0),
         node("Concat", "values values", "y", axis=0)],
        {"x": (4,)}, ["y", "places"], {"zero": np.array(0), "k": np.array([2])},
        kinds={"places": i64})
    indices = model(
        [node("Gather", "w i", "g"), node("Slice", "g a b c", "s"),
         node("ScatterElements", "s j u", "t", axis=0), node("Pad", "t pads", "p"),
         node("Tile", "p n", "y"), node("OneHot", "i depth values", "h")],
        {"i": (3,)}, ["y", "h"],
        {**_weights(w=(10, 4), u=(1, 3)), "a": np.array([0]), "b": np.array([2]),
         "c": np.array([0]), "j": np.array([[0, 1, 0]]), "pads": np.array([1, 0, 0, 1]),
         "n": np.array([2, 1]), "depth": np.array(6), "values": np.float32([0, 1])},
        kinds={"i": i64})
    quantised = model(
        [node("QuantizeLinear", "x sx zx", "q"), node("DequantizeLinear", "q sx zx", "d"),
         node("DequantizeLinear", "w sw zw", "f"), node("MatMul", "d f", "m"),
         node("QLinearMatMul", "q sx zx w sw zw sx zx", "n"),
         node("DequantizeLinear", "n sx zx", "e"), node("Add", "m e", "y")],
        {"x": (3, 4)}, ["y"],
        {"sx": np.float32(0.1), "zx": np.uint8(128), "sw": np.float32(0.05), "zw": np.int8(0),
         "w": np.arange(-10, 10, dtype=np.int8).reshape(4, 5)})
    doubling, summing = _bodies()
    loops = model(
        [node("Cast", "few", "trips", to=i64),  # of a byte: other counts may run for ever
         node("Loop", "trips _ x", "l squares", body=doubling),
         node("Scan", "l squares", "sum sums", body=summing, num_scan_inputs=1),
         node("SequenceConstruct", "l sum", "both"), node("SequenceAt", "both one", "second"),
         node("SequenceInsert", "both x", "three"),
         node("ConcatFromSequence", "three", "joined", axis=0),
         node("Optional", "second", "maybe"), node("OptionalGetElement", "maybe", "there"),
         node("Unique", "joined", "unique"), node("Range", "zero n one", "range"),
         node("Cast", "range", "numbers", to=1), node("Add", "numbers there", "y")],
        {"x": (4,)}, ["y", "unique", "sums"],
        {"few": np.uint8(3), "zero": np.array(0), "one": np.array(1), "n": np.array(4)})
    exported = [bert(layers=1, hidden=8, heads=2, vocabulary=20, positions=16, batch="batch",
                     sequence="sequence"),
                resnet(depths=(1,), width=2, image=9, classes=3)]
    return [convolution, attention, recurrent, control, indices, quantised, loops, *exported]


# ---------------------------------------------------------------- how it is mutated
_INTS = (0, 1, -1, 2, 3, 7, -2, 127, 128, 1 << 16, 1 << 31, -(1 << 31), (1 << 63) - 1, -(1 << 63))
_FLOATS = (0.0, -0.0, 1.0, -1.0, float("nan"), float("inf"), -float("inf"), 1e-40, 3e38)
# No Loop: with a count of 2**63 it would run for ever, as it says it should.
_WORDS = ("", "x", "y", "w", "nothing", "Add", "Reshape", "Conv", "Scan", "If", "\x00", "é" * 50)


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Damage as files suffer it: bits, holes, repetitions, a missing end."""
    content = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(content) or 1)
        kind = rng.randrange(5)
        if kind == 0:
            content[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            content[at] = rng.randrange(256)
        elif kind == 2:
            del content[at:at + rng.choice((1, 4, 64))]
        elif kind == 3:
            content[at:at] = content[at:at + rng.choice((1, 8, 64))]
        else:
            del content[at:]
        if not content:
            break
    return bytes(content)


def mutate_fields(rng: random.Random, data: bytes) -> bytes:
    """A well-formed message that says something else."""
    proto = ModelProto.FromString(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_fields(proto.graph))
        message, field, value = rng.choice(places)
        try:
            _change(rng, message, field, value)
        except (TypeError, ValueError, OverflowError):
            continue
    return proto.SerializeToString()


def _fields(message: Any) -> Iterator[tuple[Any, Any, Any]]:
    for field, value in message.ListFields():
        yield message, field, value
        if field.type == field.TYPE_MESSAGE:
            for inner in value if hasattr(value, "__len__") else [value]:
                yield from _fields(inner)


def _change(rng: random.Random, message: Any, field: Any, value: Any) -> None:
    name = field.name
    if hasattr(value, "add") or hasattr(value, "append"):
        if not len(value):
            return
        at = rng.randrange(len(value))
        kind = rng.randrange(3)
        if kind == 0:
            del value[at]
        elif kind == 1 and hasattr(value, "add"):
            value.add().CopyFrom(value[at])
        elif not hasattr(value, "add"):
            value[at] = _other(rng, value[at])
        else:
            del value[at:]
    elif field.type == field.TYPE_MESSAGE or rng.random() < 0.2:
        message.ClearField(name)
    else:
        setattr(message, name, _other(rng, value))


def _other(rng: random.Random, value: Any) -> Any:
    if isinstance(value, str):
        return rng.choice(_WORDS)
    if isinstance(value, bytes):
        return mutate_bytes(rng, value) if value else b"\x01"
    if isinstance(value, float):
        return rng.choice(_FLOATS)
    return rng.choice((*_INTS, value + 1, value - 1))


def mutant(seed: int, number: int) -> bytes:
    """Mutant number so-and-so of a run."""
    rng = random.Random(f"{seed}/{number}")
    data = rng.choice(seeds()).SerializeToString()
    return rng.choice((mutate_bytes, mutate_fields, mutate_fields))(rng, data)


# ---------------------------------------------------------------- trying
def attempt(data: bytes) -> str:
    """What became of a mutant: "runs" or "refused"; any other exception is a failure."""
    from terrazzo.errors import TerrazzoError
    from terrazzo.frontends.onnx.session import Session
    from terrazzo.tools.cli.models import random_inputs

    try:
        session = Session(data)
        for port in session.inputs:
            sizes = [n for n in port.shape or () if isinstance(n, int)]
            if np.prod(sizes, dtype=np.float64) > LARGEST_INPUT:
                return "loaded"
        session.run(random_inputs(session.inputs, {}))
    except TerrazzoError:
        return "refused"
    return "runs"


def _worker(connection: Connection, memory: int) -> None:
    import logging

    logging.disable(logging.CRITICAL)
    import terrazzo.frontends.onnx.session  # noqa: F401  before the limit, which is for mutants

    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    while True:
        data = connection.recv_bytes()
        faulthandler.dump_traceback_later(SECONDS - 5)  # where it hangs, should it hang
        try:
            answer = attempt(data)
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        faulthandler.cancel_dump_traceback_later()
        connection.send(answer)


class _Slot:
    def __init__(self) -> None:
        self.number = -1
        self.start()

    def start(self) -> None:
        mine, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=_worker, args=(theirs, MEMORY), daemon=True)
        self.process.start()
        theirs.close()
        self.connection, self.busy = mine, False

    def give(self, number: int, data: bytes) -> None:
        self.number, self.data, self.since, self.busy = number, data, time.monotonic(), True
        self.connection.send_bytes(data)

    def restart(self) -> None:
        self.process.kill()
        self.process.join()
        self.start()


def run(mutants: int, seed: int, jobs: int, say: Callable[[str], None] = print
        ) -> tuple[collections.Counter[str], list[tuple[int, str]]]:
    """How often each end came, and the failures by number."""
    slots = [_Slot() for _ in range(jobs)]
    ends: collections.Counter[str] = collections.Counter()
    failures: list[tuple[int, str]] = []
    numbers = iter(range(mutants))
    done = 0

    def settle(slot: _Slot, answer: str) -> None:
        nonlocal done
        done += 1
        slot.busy = False
        good = answer in ("runs", "refused", "loaded")
        ends[answer if good else "failed"] += 1
        if not good:
            path = Path(tempfile.gettempdir()) / f"mutant_{seed}_{slot.number}.onnx"
            path.write_bytes(slot.data)
            failures.append((slot.number, answer))
            say(f"mutant {slot.number}: {answer}  ({path})")

    try:
        while done < mutants:
            for slot in slots:
                if not slot.busy and (number := next(numbers, None)) is not None:
                    slot.give(number, mutant(seed, number))
            for connection in wait([s.connection for s in slots if s.busy], timeout=1.0):
                slot = next(s for s in slots if s.connection is connection)
                try:
                    settle(slot, slot.connection.recv())
                except (EOFError, ConnectionResetError):
                    slot.process.join()
                    settle(slot, f"crash, exit code {slot.process.exitcode}")
                    slot.start()
            for slot in slots:
                if slot.busy and time.monotonic() - slot.since > SECONDS:
                    settle(slot, f"no answer in {SECONDS} s")
                    slot.restart()
    finally:
        for slot in slots:
            slot.process.kill()
    return ends, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    started = time.monotonic()
    ends, failures = run(given.mutants, given.seed, given.jobs)
    print(f"{given.mutants} mutants in {time.monotonic() - started:.0f} s: "
          + ", ".join(f"{count} {end}" for end, count in ends.most_common()))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
