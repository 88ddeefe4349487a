"""Models as people write them: transformers' own code, trained with both backends of inductor.

Weights are random and sizes small; what is tried is the code of the models.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
transformers = pytest.importorskip("transformers")
from inductor_cases import Launches, Training, floats, integers, train  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.triton, pytest.mark.torch,
              pytest.mark.filterwarnings("ignore::DeprecationWarning"),
              pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")),
                                 reason="inductor's C++ backend needs a C++ compiler")]


def of(kind: str, config: str, **sizes: object) -> Callable[[], torch.nn.Module]:
    """Makes a model of transformers from its configuration."""
    return lambda: getattr(transformers, kind)(getattr(transformers, config)(**sizes))


def loss(model: torch.nn.Module, **arguments: torch.Tensor) -> torch.Tensor:
    return model(**arguments).loss


WORDS = integers(0, 100, 2, 16)
TEXT = {"input_ids": WORDS, "labels": WORDS}
IMAGES = {"pixel_values": floats(4, 3, 32, 32), "labels": torch.arange(4)}
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 128}
# Two compilations of one graph draw other numbers, and the loss would say so.
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "bert": Training(of("BertForMaskedLM", "BertConfig", vocab_size=100, **SIZES, **NO_DROPOUT),
                     TEXT | {"attention_mask": (WORDS > 20).long()}, loss, of_others=True),
    "gpt2": Training(of("GPT2LMHeadModel", "GPT2Config", vocab_size=100, n_positions=64, n_embd=64,
                        n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
                        use_cache=False, bos_token_id=0, eos_token_id=0),
                     TEXT, loss, of_others=True),
    "llama": Training(of("LlamaForCausalLM", "LlamaConfig", vocab_size=100, num_key_value_heads=2,
                         use_cache=False, **SIZES), TEXT, loss, of_others=True),
    "vit": Training(of("ViTForImageClassification", "ViTConfig", image_size=32, patch_size=8,
                       num_labels=4, **SIZES, **NO_DROPOUT), IMAGES, loss, of_others=True),
    "resnet": Training(of("ResNetForImageClassification", "ResNetConfig", embedding_size=16,
                          hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=4),
                       IMAGES, loss, of_others=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_training(name: str, launches: Launches) -> None:
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        mine = train(MODELS[name], "triton")
        assert launches.count > 20
        theirs = train(MODELS[name], "cpp")
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
