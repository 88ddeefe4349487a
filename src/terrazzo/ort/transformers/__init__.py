"""onnxruntime's tools for transformers: what models need is here, the rest is its own if installed.

Libraries import these tools beside the engine; they are Python on top of it.
"""

from terrazzo.ort.tools import folders

__path__ += folders("transformers")
