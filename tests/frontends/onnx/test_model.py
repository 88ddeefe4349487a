"""Reading model files: in place, checked, and never outside the model's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from terrazzo.errors import ModelError
from terrazzo.frontends.onnx.model import load_model
from terrazzo.frontends.onnx.wire import LARGE, cut_weights

from .models import model, node


def small(weights: dict[str, np.ndarray]) -> onnx.ModelProto:
    return model([node("Add", "x w", "y")], {"x": (3,)}, ["y"], weights)


def test_large_weights_are_cut_out_and_found_again() -> None:
    large = np.arange(LARGE, dtype=np.float32)
    data = small({"w": large, "small": np.ones(3, np.float32)}).SerializeToString()
    cut = cut_weights(memoryview(data))
    assert set(cut.ranges) == {"w"} and len(cut.structure) < LARGE
    at, size = cut.ranges["w"]
    assert data[at:at + size] == large.tobytes()
    weights = load_model(data).weights
    assert np.array_equal(weights["w"], large) and np.array_equal(weights["small"], np.ones(3))


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "uint64", "bool"])
def test_types_of_weights(dtype: str) -> None:
    array = (np.arange(2000) % 2).astype(dtype)
    assert np.array_equal(load_model(small({"w": array})).weights["w"], array)


def test_four_bits_are_unpacked() -> None:
    tensor = helper.make_tensor("w", onnx.TensorProto.INT4, (5,), [-8, 7, 0, -1, 3])
    proto = small({"v": np.zeros(3, np.float32)})
    proto.graph.initializer.append(tensor)
    proto.graph.node[0].input[1] = "v"
    assert load_model(proto).weights["w"].astype(int).tolist() == [-8, 7, 0, -1, 3]


def test_digest_tells_weights_apart() -> None:
    one, two = (load_model(small({"w": np.full(3, n, np.float32)})).digest for n in (1, 2))
    assert one != two
    assert one == load_model(small({"w": np.ones(3, np.float32)})).digest


# ---------------------------------------------------------------- data in other files
def save_external(folder: Path, location: str, **extra: int) -> Path:
    proto = small({"w": np.arange(3, dtype=np.float32)})
    tensor = proto.graph.initializer[0]
    (folder / "data.bin").write_bytes(tensor.raw_data)
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": location, **extra}.items():
        tensor.external_data.add(key=key, value=str(value))
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def test_external_data(tmp_path: Path) -> None:
    loaded = load_model(save_external(tmp_path, "data.bin"))
    assert loaded.weights["w"].tolist() == [0, 1, 2]
    before = loaded.digest
    (tmp_path / "data.bin").write_bytes(np.ones(3, np.float32).tobytes())
    assert load_model(tmp_path / "model.onnx").digest != before


@pytest.mark.parametrize("location", ["../data.bin", "/etc/passwd", "", "sub/../../data.bin"])
def test_a_location_outside_the_folder_is_refused(tmp_path: Path, location: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "data.bin").write_bytes(bytes(12))
    with pytest.raises(ModelError, match="outside the model's folder"):
        load_model(save_external(folder, location))


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(bytes(12))
    (folder / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(ModelError, match="outside the model's folder"):
        load_model(save_external(folder, "link"))


@pytest.mark.parametrize("extra", [{"offset": 8}, {"length": 100}, {"offset": -4}])
def test_external_data_that_is_not_there(tmp_path: Path, extra: dict[str, int]) -> None:
    with pytest.raises(ModelError, match="'w'"):
        load_model(save_external(tmp_path, "data.bin", **extra))


# ---------------------------------------------------------------- what is wrong with a model
def broken(change: Any) -> onnx.ModelProto:
    proto = model([node("Add", "x w", "y"), node("Relu", "y", "z")], {"x": (3,)}, ["z"],
                  {"w": np.ones(3, np.float32)})
    change(proto)
    return proto


@pytest.mark.parametrize(("change", "message"), [
    (lambda p: p.ClearField("graph"), "no ONNX graph"),
    (lambda p: p.graph.node[0].input.__setitem__(0, "q"), "reads 'q', which nothing makes"),
    (lambda p: p.graph.node[0].input.__setitem__(0, "z"), "has a cycle"),
    (lambda p: p.graph.node[1].output.__setitem__(0, "y"), "'y', which exists already"),
    (lambda p: p.graph.output[0].__setattr__("name", "q"), "nothing makes the output 'q'"),
    (lambda p: p.graph.initializer.append(p.graph.initializer[0]), "two initialisers"),
    (lambda p: p.graph.input.append(p.graph.input[0]), "two inputs"),
    (lambda p: p.graph.initializer[0].dims.__setitem__(0, -3), "impossible shape"),
    (lambda p: p.graph.initializer[0].dims.__setitem__(0, 5), "needs 20 bytes"),
    (lambda p: p.opset_import[0].__setattr__("version", 3), "opset 3"),
    (lambda p: p.graph.node[0].__setattr__("op_type", ""), "names no operator"),
])
def test_broken_models(change: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(broken(change))


@pytest.mark.parametrize("data", [b"", b"hello, world", bytes(100), b"\xff" * 50])
def test_no_model_at_all(data: bytes) -> None:
    with pytest.raises(ModelError):
        load_model(data)


def test_a_truncated_file(tmp_path: Path) -> None:
    data = small({"w": np.zeros(5000, np.float32)}).SerializeToString()
    path = tmp_path / "short.onnx"
    for size in (1, 20, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(ModelError, match=r"short\.onnx"):
            load_model(path)


def test_an_old_operator_that_never_changed_is_read() -> None:
    proto = model([node("Not", "x", "y")], {"x": (3,)}, ["y"], opset=1,
                  kinds={"x": onnx.TensorProto.BOOL, "y": onnx.TensorProto.BOOL})
    assert load_model(proto).opsets[""] == 1


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot read"):
        load_model(tmp_path / "none.onnx")
