"""ATen operators in terms of ours: one converter each (`registry.py` says how to add one)."""

from terrazzo.torch.aten import (
    attention as attention,
)
from terrazzo.torch.aten import (
    convolutions as convolutions,
)
from terrazzo.torch.aten import (
    creation as creation,
)
from terrazzo.torch.aten import (
    indexing as indexing,
)
from terrazzo.torch.aten import (
    norms as norms,
)
from terrazzo.torch.aten import (
    pointwise as pointwise,
)
from terrazzo.torch.aten import (
    products as products,
)
from terrazzo.torch.aten import (
    reductions as reductions,
)
from terrazzo.torch.aten import (
    shapes as shapes,
)
