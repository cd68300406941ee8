"""A plain model, cut: all stages one after the other are the model, under its own names."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from sheer import PipelineModule
from sheer.errors import DataError, UsageError
from tests.pipeline.models import WIDTH, Answer, Asks, Block, Dropping, Language, Unet

EXAMPLES = Path(__file__).parents[2] / "examples"
TOKENS = torch.arange(12).view(2, 6) % 11


def cut(model, stages, **keywords):
    """All stages of `model`, each from a copy of its own, as on ranks of their own."""
    return [
        PipelineModule.from_module(copy.deepcopy(model), num_stages=stages, stage=stage, **keywords)
        for stage in range(stages)
    ]


def run(stages, inputs):
    seen = {stage: itertools.count() for stage in range(len(stages))}
    carry = inputs
    for stage in stages[0].placement:
        carry = stages[stage].run(carry, chunk=next(seen[stage]))
    return carry


def assert_same_gradients(stages, model, *, exact=True):
    """Summed over the stages that hold a parameter, gradients are the model's; so are all names."""
    found = {}
    for module in stages:
        for name, parameter in module.named_parameters():
            found.setdefault(module.canonical.get(name, name), []).append(parameter)
    assert set(found) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        holders = found[name]
        assert len(holders) == len(stages[0].tied.get(name, (0,))), name
        grads = [holder.grad for holder in holders if holder.grad is not None]
        if parameter.grad is None:
            assert not grads, name
        elif len(grads) == 1 and exact:
            assert torch.equal(grads[0], parameter.grad), name
        else:
            torch.testing.assert_close(sum(grads), parameter.grad)
    assert set().union(*(module.state_dict() for module in stages)) == set(model.state_dict())


SPLITS = [(1, 1, "loop"), (2, 1, "loop"), (3, 1, "loop"), (4, 1, "loop"), (2, 2, "loop"), (2, 2, "v"), (7, 1, "loop")]


@pytest.mark.parametrize(("stages", "chunks", "placement"), SPLITS)
@pytest.mark.parametrize("method", ["uniform", "parameters", "type:block"])
def test_a_language_model_with_its_own_loss(stages, chunks, placement, method):
    model = Language()
    split = cut(model, stages, blocks="body.blocks.*", chunks=chunks, placement=placement, partition_method=method)
    batch = split[0].split_batch({"tokens": TOKENS, "targets": TOKENS})
    output = run(split, batch.inputs)
    assert torch.equal(output, model(TOKENS))
    loss = split[split[0].placement[-1]].loss_fn(output, batch.label)
    plain = model(TOKENS, TOKENS)
    assert torch.equal(loss, plain)
    loss.backward()
    plain.backward()
    assert_same_gradients(split, model)
    for module in split:
        module.eval()
    assert torch.equal(run(split, TOKENS), model(TOKENS))


@pytest.mark.parametrize("stages", [1, 2, 4, 6])
def test_skips_and_late_integers_travel(stages):
    model = Unet()
    split = cut(model, stages, blocks=["down.*", "up.*"], loss_fn=lambda out, label: None, partition_method="uniform")
    x = torch.randn(2, WIDTH, requires_grad=True)
    out = run(split, (x, 3))
    plain = model(x, 3)
    assert torch.equal(out["out"], plain["out"])
    assert torch.equal(out["parts"][0], plain["parts"][0])
    assert out["parts"][1] == 2
    out["out"].sum().backward()
    plain["out"].sum().backward()
    assert_same_gradients(split, model)


def test_only_what_is_alive_travels():
    split = cut(Unet(), 2, blocks=["down.*", "up.*"], loss_fn=print, boundaries=[0, 3, 7])
    carry = split[0].run((torch.randn(2, WIDTH), 3))
    assert len(carry) == 4  # two skips, x (the third one is x), the step
    assert 3 in carry


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_modes_branches_repeated_blocks_and_dataclasses(stages):
    model = Dropping()
    x, mask, labels = torch.randn(2, 5, WIDTH), torch.ones(2, 5), torch.tensor([[0, 1, 2, 1, 0]] * 2)
    sample = {"x": x, "mask": mask, "labels": labels}
    split = cut(model, stages, blocks=["first", "shared"], sample_input=sample)
    last = split[-1]
    for mode in (True, False):
        for module in (model, *split):
            module.train(mode)
            module.zero_grad()
        torch.manual_seed(3)
        loss = last.loss_fn(run(split, {"x": x, "mask": mask}), labels)
        torch.manual_seed(3)
        plain = model(**sample).loss
        assert torch.equal(loss, plain)
        loss.backward()
        plain.backward()
        assert_same_gradients(split, model)
    longer = torch.randn(1, 16, WIDTH)
    run(split, {"x": longer, "mask": torch.ones(1, 16)})
    with pytest.raises(UsageError, match=r"models.py:\d+ `assert x.shape\[1\] <= 16"):
        run(split, {"x": torch.randn(1, 17, WIDTH), "mask": torch.ones(1, 17)})


def test_one_stage_is_called_like_the_model():
    model = Language()
    module = PipelineModule.from_module(model, blocks="body.blocks.*", num_stages=1, stage=0)
    assert torch.equal(module(TOKENS), model(TOKENS))
    assert torch.equal(module(TOKENS, targets=TOKENS), model(TOKENS, TOKENS))
    assert module.state_dict().keys() == model.state_dict().keys()
    answers = PipelineModule.from_module(
        Dropping(),
        blocks=["first", "shared"],
        num_stages=1,
        stage=0,
        inputs="x",
        sample_input={"x": torch.ones(1, 2, 8)},
    )
    assert isinstance(answers(torch.ones(1, 2, WIDTH), labels=torch.zeros(1, 2).long()), Answer)


def test_the_stage_holds_the_models_own_modules_and_no_others():
    model = Language()
    module = PipelineModule.from_module(
        model, blocks="body.blocks.*", num_stages=2, stage=1, partition_method="uniform"
    )
    assert module.get_submodule("body.blocks.2") is model.body["blocks"][2]
    assert module.head is model.head
    assert module.scale is model.scale
    block = {f"body.blocks.2.{name}" for name in model.body["blocks"][2].state_dict()}
    assert set(module.state_dict()) == {"scale", "shift", "head.weight"} | block
    assert module.tied == {"head.weight": (0, 1), "scale": (0, 1)}
    gone = weakref.ref(model.body["blocks"][0])
    del model
    gc.collect()
    assert gone() is None
    assert module.run is not None


def test_hooks_fire_as_in_the_model():
    model = Language()
    calls = []
    for name, child in model.named_modules():
        if name in ("embed", "head") or name.startswith("body.blocks."):
            child.register_forward_hook(lambda *_, name=name: calls.append(name))
    model(TOKENS, TOKENS)
    expected, calls[:] = list(calls), []
    split = [PipelineModule.from_module(model, blocks="body.blocks.*", num_stages=2, stage=stage) for stage in range(2)]
    assert calls == []
    run(split, TOKENS)
    assert calls == expected


def test_copies_and_pickles():
    module = cut(Language(), 2, blocks="body.blocks.*")[1]
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        carry = cut(Language(), 2, blocks="body.blocks.*")[0].run(TOKENS)
        assert torch.equal(other.run(carry), module.run(carry))
        label = TOKENS
        other.loss_fn(other.run(carry), label).backward()
        assert other.head.weight.grad is not None
    assert module.head.weight.grad is None


def test_recorded_again_for_the_example():
    sys.path.insert(0, str(EXAMPLES))
    try:
        from gpt import GPT, GPTConfig
    finally:
        sys.path.remove(str(EXAMPLES))
    model = GPT(GPTConfig(layers=2, width=24, heads=2))
    tokens = torch.randint(256, (2, 9))
    split = cut(model, 2, blocks="blocks.*")
    loss = split[1].loss_fn(run(split, tokens), tokens)
    plain = model(tokens, tokens)
    assert torch.equal(loss, plain)
    loss.backward()
    plain.backward()
    assert_same_gradients(split, model)
    assert split[0].tied == {"embed.weight": (0, 1)}
    assert split[1].canonical == {"head.weight": "embed.weight"}


# ---- mistakes


def test_a_decision_on_data_names_its_line():
    with pytest.raises(UsageError, match=r"models.py:\d+ `if x.sum\(\) > 0:`.*sample_input"):
        cut(Asks(), 2, blocks="blocks.*", loss_fn=print)
    split = cut(Asks(), 2, blocks="blocks.*", loss_fn=print, sample_input=torch.ones(1, WIDTH))
    run(split, torch.ones(1, WIDTH))
    with pytest.raises(UsageError, match=r"models.py:\d+ `if x.sum\(\) > 0:`.*this was True.*now it is False"):
        run(split, -10 * torch.ones(1, WIDTH))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"blocks": "body.block.*"}, r"matches no module of Language. Did you mean 'body.blocks'"),
        ({"blocks": "body.blocks"}, r"'body.blocks' is a ModuleList, which is not called; name .*'body.blocks.\*'"),
        ({"blocks": "unused"}, r"called alike"),
        ({"inputs": "token"}, r"no argument 'token'.*Did you mean 'tokens'"),
        ({"labels": "tokens"}, r"tokens cannot be the label: the forward needs it before the last block"),
        ({"boundaries": [0, 9]}, r"boundaries \[0, 9\] do not cut 5 layers into 2 parts"),
        ({"partition_method": "type:transformer"}, r"matches no layer; their classes are Prologue, Block, Epilogue"),
        ({"partition_method": "parameter"}, r"Did you mean 'parameters'"),
    ],
)
def test_mistakes_when_cutting(keywords, message):
    with pytest.raises(UsageError, match=message):
        cut(Language(), 2, **{"blocks": "body.blocks.*"} | keywords)


def test_hooks_on_what_is_cut_are_refused():
    model = Language()
    model.body.register_forward_hook(lambda *_: None)
    with pytest.raises(UsageError, match=r"body \(ModuleDict\) has forward hooks, but its forward is cut"):
        cut(model, 2, blocks="body.blocks.*")


def test_mistakes_in_batches():
    first, _ = cut(Language(), 2, blocks="body.blocks.*")
    with pytest.raises(DataError, match=r"'token' is no argument.*Did you mean 'tokens'"):
        first.run({"token": TOKENS})
    with pytest.raises(DataError, match="no input 'tokens'; it has nothing"):
        first.run({})
    unet = cut(Unet(), 2, blocks=["down.*", "up.*"], loss_fn=print)[0]
    with pytest.raises(DataError, match="cut with the inputs x, step, but got 3"):
        unet.run((TOKENS, 1, 2))


def test_nothing_stays_on_the_model():
    model = Language()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    cut_model = PipelineModule.from_module(model, blocks="body.blocks.*", num_stages=1, stage=0)
    assert cut_model.training
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert isinstance(model.body["blocks"][0], Block)
    assert all(module.training for module in model.modules())
    assert isinstance(model.embed, nn.Embedding)


def test_a_stage_has_the_models_order():
    model = Language()
    module = PipelineModule.from_module(model, blocks="body.blocks.*", num_stages=1, stage=0)
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert list(module.state_dict()) == list(model.state_dict())


class Shapes(nn.Module):
    """A shape and a device found before the blocks and used after them; statistics in a buffer."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        shape, device = x.size(), x.device
        x = self.norm(x.flatten(0, 1))
        for block in self.blocks:
            x = block(x)
        return x.view(shape) + torch.arange(WIDTH, device=device), shape[0]


def test_shapes_travel_and_devices_do_not():
    model = Shapes()
    split = cut(model, 2, blocks="blocks.*", loss_fn=print, boundaries=[0, 2, 4])
    x = torch.randn(2, 3, WIDTH)
    carry = split[0].run(x)
    assert [type(value) for value in carry if not isinstance(value, torch.Tensor)] == [torch.Size]
    out, batch = split[1].run(carry)
    assert torch.equal(out, model(x)[0])
    assert batch == 2


def test_measuring_leaves_the_model_alone():
    model = Shapes()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    module = PipelineModule.from_module(
        model, blocks="blocks.*", num_stages=2, stage=0, loss_fn=print, partition_method="time",
        sample_input=torch.randn(2, 3, WIDTH),
    )  # fmt: skip
    assert len(module.parts) == 2
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    torch.set_rng_state(state)
