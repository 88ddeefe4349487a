"""One operator, written once: torch eager, torch.compile, torch.export, ONNX, and its gradient.

    python examples/squared_relu_everywhere.py

A squared ReLU with a learnable scale and shift. Nothing below says how it is computed or
differentiated a second time.
"""

import tempfile
from pathlib import Path

import torch

import terrazzo as tz


@tz.op
def squared_relu(x, alpha=1.0, beta=0.0):
    positive = tz.maximum(x, 0.0)
    return alpha * positive * positive + beta


op = tz.torch.register(squared_relu, "mylib::squared_relu")


class SquaredReLU(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.alpha = torch.nn.Parameter(torch.tensor(1.5))
        self.beta = torch.nn.Parameter(torch.tensor(0.25))

    def forward(self, x):
        return op(x, self.alpha, self.beta)


def reference(x, alpha, beta):
    return alpha * torch.relu(x) ** 2 + beta


def backends():
    """Inductor, and ours, which an installed terrazzo has made known by its name."""
    if "terrazzo" in torch._dynamo.list_backends(exclude_tags=()):
        return {"inductor": "inductor", "terrazzo": "terrazzo"}
    from terrazzo.torch.backend import terrazzo

    return {"inductor": "inductor", "terrazzo": terrazzo}


def check_eager(model, x):
    """Values and gradients by the input, the scale and the shift."""
    assert set(torch.library.opcheck(op, (x,)).values()) == {"SUCCESS"}
    torch.testing.assert_close(model(x), reference(x, model.alpha, model.beta))
    exact = [t.detach().double().requires_grad_() for t in (x, model.alpha, model.beta)]
    assert torch.autograd.gradcheck(op, exact, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(op, exact)
    print("torch eager     values, first and second derivatives")


def check_compiled(model, x, name, backend):
    """The same in one graph, with its gradients."""
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    wanted = (x.detach().requires_grad_(), model.alpha, model.beta)
    found, want = compiled(wanted[0]), reference(*wanted)
    torch.testing.assert_close(found, want)
    for a, b in zip(torch.autograd.grad(found.sum(), wanted),
                    torch.autograd.grad(want.sum(), wanted)):
        torch.testing.assert_close(a, b)
    print(f"torch.compile   {name}: values and gradients, no graph break")


def check_exported(model, x):
    """A graph of torch's that holds the operator itself, for any number of rows."""
    rows = ({0: torch.export.Dim.DYNAMIC},)
    exported = torch.export.export(model, (x,), dynamic_shapes=rows)
    assert op.default in [node.target for node in exported.graph.nodes]
    more = torch.randn(2 * len(x) + 1, *x.shape[1:])
    torch.testing.assert_close(exported.module()(more), model(more))
    print("torch.export    the operator stays in the graph")


def check_onnx(model, x, file):
    """A file that names the operator, in a session of ours, for any number of rows."""
    torch.onnx.export(model, (x,), file, dynamo=True, verbose=False,
                      custom_translation_table=tz.torch.onnx_translations(),
                      dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    session = tz.ort.InferenceSession(file)
    more = torch.randn(2 * len(x) + 1, *x.shape[1:])
    (found,) = session.run(None, {session.get_inputs()[0].name: more.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(more).detach())
    print("ONNX            a node of the domain mylib, run by our session")


def main():
    torch.manual_seed(0)
    model, x = SquaredReLU().eval(), torch.randn(3, 5)
    check_eager(model, x)
    for name, backend in backends().items():
        check_compiled(model, x, name, backend)
    check_exported(model, x)
    with tempfile.TemporaryDirectory() as folder:
        check_onnx(model, x, str(Path(folder) / "model.onnx"))


if __name__ == "__main__":
    main()
