"""`tz.torch.export`: files that run without torch, and say what they are for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo import ort
from terrazzo.errors import ArgumentError, ModelError, ShapeError, UnsupportedOperator
from terrazzo.session import CompiledModel

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

pytestmark = pytest.mark.torch


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4)
        self.register_buffer("shift", torch.randn(4))

    def forward(self, x: Any, scale: Any = None) -> Any:
        y = self.last(nn.functional.gelu(self.norm(self.first(x)))).softmax(-1) + self.shift
        return y if scale is None else (y, y.sum(0) * scale)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "model.tzx")


def model() -> Any:
    torch.manual_seed(0)
    return Small().eval()


def close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_a_file_runs_in_a_process_without_torch(path: str, tmp_path: Path) -> None:
    net, x = model(), torch.randn(3, 16)
    tz.torch.export(net, (x,), path)
    np.save(tmp_path / "x.npy", x.numpy())
    program = (f"import sys, numpy as np, terrazzo as tz; "
               f"y = tz.load({path!r})(np.load({str(tmp_path / 'x.npy')!r})); "
               f"assert 'torch' not in sys.modules and 'onnx' not in sys.modules; "
               f"np.save({str(tmp_path / 'y.npy')!r}, y)")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    close(np.load(tmp_path / "y.npy"), net(x))


def test_sizes_may_vary(path: str) -> None:
    net, x = model(), torch.randn(3, 16)
    made = tz.torch.export(net, (x,), path, dynamic_shapes={"x": {0: torch.export.Dim("batch")}})
    assert str(made.input_types[0][2][0]) == "batch"
    loaded = tz.load(path)
    for n in (1, 2, 3, 8, 33):
        x = torch.randn(n, 16)
        close(loaded(x.numpy()), net(x))
    with pytest.raises(ShapeError, match="1 <= batch"):
        loaded(np.zeros((0, 16), np.float32))
    with pytest.raises(ShapeError, match="expected"):
        loaded(np.zeros((2, 17), np.float32))


def test_what_the_graph_assumes_of_sizes_is_in_the_file(path: str) -> None:
    x = torch.randn(6, 4)
    dims = {"x": {0: torch.export.Dim("n", min=4)}}
    tz.torch.export(_Named(lambda x: x.narrow(0, 1, 3) * x.shape[0]), (x,), path,
                    dynamic_shapes=dims)
    loaded = tz.load(path)
    y = np.arange(40, dtype=np.float32).reshape(10, 4)
    np.testing.assert_array_equal(loaded(y), y[1:4] * 10)
    with pytest.raises(ShapeError, match="4 <= n"):
        loaded(y[:3])


def test_a_part_of_a_dimension_cannot_vary_by_itself(path: str) -> None:
    with pytest.raises(UnsupportedOperator, match="not itself a dimension"):
        tz.torch.export(_Named(lambda x: x + 1), (torch.randn(6, 4),), path,
                        dynamic_shapes={"x": {0: 2 * torch.export.Dim("half")}})


class _Named(nn.Module):
    def __init__(self, function: Any):
        super().__init__()
        self.function = function
        self.eval()

    def forward(self, x: Any) -> Any:
        return self.function(x)


def test_names_of_inputs_and_outputs(path: str) -> None:
    net, x, scale = model(), torch.randn(3, 16), torch.tensor(2.0)
    tz.torch.export(net, (x,), path, kwargs={"scale": scale}, output_names=["y", "total"])
    compiled = CompiledModel.load(path)
    assert [p.name for p in compiled.inputs] == ["x", "scale"]
    assert [p.name for p in compiled.outputs] == ["y", "total"]
    session = ort.InferenceSession(path)
    assert [(i.name, i.type, i.shape) for i in session.get_inputs()] == [
        ("x", "tensor(float)", [3, 16]), ("scale", "tensor(float)", [])]
    assert session.get_modelmeta().custom_metadata_map["torch"] == torch.__version__
    (total,) = session.run(["total"], {"x": x.numpy(), "scale": scale.numpy()})
    close(total, net(x, scale)[1])
    with pytest.raises(ModelError, match="scale"):
        session.run(None, {"x": x.numpy()})


def test_plain_functions(path: str) -> None:
    x = torch.randn(5, 7)
    tz.torch.export(lambda x: torch.relu(x).sum(1), (x,), path)
    close(tz.load(path)(x.numpy()), torch.relu(x).sum(1))


def test_parameters_of_functions_name_the_inputs(path: str) -> None:
    rows = torch.export.Dim("rows", max=64)
    tz.torch.export(lambda left, right: left - right, (torch.ones(4, 2), torch.ones(2)), path,
                    dynamic_shapes={"left": {0: rows}, "right": {}})
    session = ort.InferenceSession(path)
    assert [i.name for i in session.get_inputs()] == ["left", "right"]
    given = {"left": np.full((7, 2), 3, np.float32), "right": np.ones(2, np.float32)}
    np.testing.assert_array_equal(session.run(None, given)[0], np.full((7, 2), 2))
    tz.torch.export(torch.relu, (torch.ones(4),), path)  # written in C: tells no names
    np.testing.assert_array_equal(tz.load(path)(np.full(4, -1, np.float32)), np.zeros(4))


def test_a_size_is_no_result(path: str) -> None:
    class Counted(nn.Module):
        def forward(self, x: Any) -> Any:
            return x + 1, x.shape[0]

    for sizes in (None, {"x": {0: torch.export.Dim("n")}}):
        with pytest.raises(UnsupportedOperator, match="a result of the model is no tensor"):
            tz.torch.export(Counted().eval(), (torch.ones(4),), path, dynamic_shapes=sizes)


def test_channels_last_arguments_are_plain_arrays_later(path: str) -> None:
    net = nn.Conv2d(3, 8, 3).eval()
    x = torch.randn(2, 3, 9, 9).to(memory_format=torch.channels_last)
    tz.torch.export(net, (x,), path)
    close(tz.load(path)(np.ascontiguousarray(x.numpy())), net(x))


def test_weights_of_a_file_do_not_follow_the_model(path: str) -> None:
    net, x = model(), torch.randn(3, 16)
    wanted = net(x)
    tz.torch.export(net, (x,), path)
    with torch.no_grad():
        net.last.weight.zero_()
    close(tz.load(path)(x.numpy()), wanted)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Any) -> Any:
        self.count += 1
        return x * self.count


@pytest.mark.parametrize("net, error, text", [
    (Counting().eval(), UnsupportedOperator, "changes count"),
    (nn.Dropout().train(), ArgumentError, "training"),
    (_Named(lambda x: x[x > 0]), UnsupportedOperator, "contents of its inputs"),
    (_Named(lambda x: torch.linalg.eigvals(x)), UnsupportedOperator, "linalg_eig"),
    (_Named(lambda x: torch.linalg.inv(x)), UnsupportedOperator, "error of its own"),
])
def test_what_cannot_be_exported_says_why(path: str, net: Any, error: type[Exception], text: str
                                          ) -> None:
    with pytest.raises(error, match=text):
        tz.torch.export(net, (torch.randn(4, 4),), path)
    assert not Path(path).exists()
