"""One operator, written once: run, differentiated, looked at, checked and timed.

    python examples/gelu.py
"""

import numpy as np

import terrazzo as tz


@tz.op
def gelu(x):
    return 0.5 * x * (1 + tz.tanh(0.79788456 * (x + 0.044715 * x**3)))


x = np.random.default_rng(0).standard_normal((1024, 1024)).astype("float32")

y = gelu(x)
print("y  ", y[0, :4])

dx = tz.grad(lambda x: tz.sum(gelu(x)))(x)
print("dx ", dx[0, :4])

print(gelu.lower(x, "expr"), gelu.lower(x, "loop"), sep="\n\n")

print(gelu.verify())
print(gelu.bench(x))

try:
    import torch
except ImportError:
    print("torch is not installed: pip install torch to see the operator inside autograd")
else:
    t = torch.randn(8, 8, requires_grad=True)
    gelu(t).sum().backward()
    print("torch's gradient", t.grad[0, :4])
