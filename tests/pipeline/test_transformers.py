"""Models of transformers, cut: their own losses and gradients, masks and positions carried along."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.pipeline.test_cut import assert_same_gradients, cut, run

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

TOKENS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=16, n_layer=3, n_head=2, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), "transformer.h.*"


def llama():
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), "model.layers.*"


@pytest.mark.parametrize("build", [gpt2, llama])
def test_it_is_the_plain_model_at_lengths_that_it_was_not_cut_with(build):
    model, blocks = build()
    sample = {"input_ids": TOKENS, "labels": TOKENS}
    constants = {"use_cache": False, "return_dict": False}
    split = cut(copy.deepcopy(model), 2, blocks=blocks, sample_input=sample, constants=constants)
    for tokens in (TOKENS, TOKENS[:, :7]):
        batch = split[0].split_batch({"input_ids": tokens, "labels": tokens})
        output = run(split, batch.inputs)
        loss = split[1].loss_fn(output, batch.label)
        plain = model(input_ids=tokens, labels=tokens, use_cache=False)
        torch.testing.assert_close(output, plain.logits)
        torch.testing.assert_close(loss, plain.loss)
        for module in (*split, model):
            module.zero_grad()
        loss.backward()
        plain.loss.backward()
        assert_same_gradients(split, model, exact=False)
