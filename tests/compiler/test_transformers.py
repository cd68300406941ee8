"""Models of transformers, built from a config: one graph, no breaks, equal losses, right generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from sheer.compiler.report import Report
from tests.compiler.models import compiled, twin

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TOKENS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))
TEXT = {"input_ids": TOKENS, "labels": TOKENS, "attention_mask": torch.ones_like(TOKENS)}
IMAGES = {
    "pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)),
    "labels": torch.tensor([1, 2]),
}


def llama(*, use_cache: bool = False) -> nn.Module:
    config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, max_position_embeddings=64, **SIZES)
    config.use_cache = use_cache
    return transformers.LlamaForCausalLM(config)


def gpt2(*, use_cache: bool = False) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    )
    config.use_cache = use_cache
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=64, max_position_embeddings=64, **SIZES))


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=16, patch_size=4, num_labels=5, **SIZES)
    )


class Case(NamedTuple):
    make: Callable[..., nn.Module]
    batch: dict[str, torch.Tensor]


CASES = {"llama": Case(llama, TEXT), "gpt2": Case(gpt2, TEXT), "bert": Case(bert, TEXT), "vit": Case(vit, IMAGES)}


def _made(make: Callable[..., nn.Module], **config: Any) -> nn.Module:
    torch.manual_seed(0)
    return make(**config).train()


def _losses(model: nn.Module, batch: dict[str, torch.Tensor]) -> list[float]:
    """Three steps of training, dropout and all."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for seed in range(3):
        torch.manual_seed(seed)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_training_equals_eager_with_one_graph_and_no_break(name: str) -> None:
    model = _made(CASES[name].make)
    plain = twin(model)
    compiler = compiled(model, backend="aot_eager")
    assert len(compiler.targets) == 2
    _train_alike(model, plain, CASES[name].batch, compiler.report)


def _train_alike(model: nn.Module, plain: nn.Module, batch: dict[str, torch.Tensor], report: Report) -> None:
    assert _losses(model, batch) == _losses(plain, batch)
    assert report.graphs == 1
    assert report.breaks == []
    assert report.fallbacks == []
    assert report.recompiles == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_of_transformers(reentrant: bool) -> None:
    model = _made(llama)
    plain = twin(model)
    for each in (model, plain):
        each.gradient_checkpointing_enable({"use_reentrant": reentrant})
    compiler = compiled(model, backend="aot_eager")
    assert _losses(model, TEXT) == _losses(plain, TEXT)
    assert compiler.report.fallbacks == []


@pytest.mark.parametrize("make", [llama, gpt2])
def test_training_equals_eager_and_generation_is_right_and_leaves_the_graphs_of_training_alone(
    make: Callable[..., nn.Module],
) -> None:
    model = _made(make)
    plain = twin(model)
    compiler = compiled(model, backend="aot_eager")
    assert len(compiler.targets) == 2
    _train_alike(model, plain, TEXT, compiler.report)
    asked = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones(2, 4).long()}
    for each in (model, plain):
        each.eval()
    assert torch.equal(model.generate(TOKENS[:, :4], **asked), plain.generate(TOKENS[:, :4], **asked))
    for each in (model, plain):
        each.train()
    assert _losses(model, TEXT) == _losses(plain, TEXT)
    assert [graph.mode for graph in compiler.report.compiled].count("training") == 1


@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_key_value_cache_while_training_is_named_with_the_mend(make: Callable[..., nn.Module]) -> None:
    model = _made(make, use_cache=True)
    plain = twin(model)
    compiler = compiled(model)
    assert _losses(model, TEXT) == _losses(plain, TEXT)
    (said,) = compiler._teller.said
    assert "keeps recompiling" in said
    assert "use_cache=False" in said
