"""Nothing wraps the module: the same object, class, keys, hooks and attributes, whatever is switched on."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import pickle
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import sheer
import sheer.testing
from tests.engine.models import Odd, batches, odd
from tests.engine.oracle import Case, values
from tests.pairs import noted

FP32, BF16, FP16 = {}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "loss_scale": 64}}
AUTOCAST = {"torch_autocast": {"enabled": True}}
SCOPES = [("auto", "auto"), ("module", "module"), ("named", ["Block", "frozen"])]
COMPILED = {"compile": {"enabled": True, "backend": "aot_eager"}}
SLOT = "_compiled_call_impl"  # where nn.Module.compile itself puts what it compiles; torch drops it from copies
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}}


class Heard(NamedTuple):
    """One call of one of the user's hooks."""

    kind: str
    name: str


def listen(module: nn.Module, heard: list[Heard], *, at: Callable[[str], bool] = lambda _: True) -> None:
    """Every hook that a user can put on a module, for those whose name `at` takes, and on a parameter."""

    def told(kind: str, name: str) -> Callable[..., None]:
        return lambda *_: heard.append(Heard(kind, name))

    for name, child in module.named_modules():
        if not at(name):
            continue
        child.register_forward_pre_hook(told("forward pre", name))
        child.register_forward_hook(told("forward", name))
        if not isinstance(child, (Odd, nn.Embedding)):  # their inputs are no floating point tensors
            child.register_full_backward_pre_hook(told("backward pre", name))
            child.register_full_backward_hook(told("backward", name))
    for name, param in module.named_parameters():
        if param.requires_grad:
            param.register_hook(told("gradient", name))
            param.register_post_accumulate_grad_hook(told("accumulated", name))


def seeded(**more: Any) -> Odd:
    torch.manual_seed(0)
    return Odd(**more)


class Face(NamedTuple):
    """What can be seen of a module from outside."""

    object: int
    cls: type
    keys: list[str]
    parameters: list[tuple[str, int, tuple[int, ...], bool]]
    modules: list[tuple[str, int, type]]
    attributes: list[str]
    representation: str


def face(module: nn.Module) -> Face:
    return Face(
        id(module),
        type(module),
        list(module.state_dict()),
        [(name, id(p), tuple(p.shape), p.requires_grad) for name, p in module.named_parameters()],
        [(name, id(child), type(child)) for name, child in module.named_modules()],
        sorted(vars(module).keys() - {SLOT}),
        repr(module),
    )


def config(stage: int, accumulation: int, *more: dict[str, Any]) -> dict[str, Any]:
    merged = Case(stage=stage, accumulation=accumulation, extra=SGD).config()
    for one in more:
        merged |= one
    return merged


PRECISIONS = {"fp32": FP32, "bf16": BF16, "fp16": FP16, "autocast": AUTOCAST}
WAYS = {"eager": {}} | {name: {"compile": {**COMPILED["compile"], "scope": scope}} for name, scope in SCOPES}
PRODUCT = [
    (way, name, stage, accumulation, when)
    # Hooks come before and after `initialize` in turn, so that every pair of other choices has both.
    for (stage, name, accumulation, way), when in zip(
        itertools.product((0, 1, 2), PRECISIONS, (1, 2), WAYS),
        itertools.cycle(("before", "after", "after", "before", "before")),
        strict=False,
    )
]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("way", WAYS)
def test_the_module_stays_what_it_is(way: str, precision: str) -> None:
    """Hooks put on it before or after `initialize` fire as often, and in the same order, as without an engine.

    Every combination; those that differ in stage, accumulation and when hooks come may find each other's graphs."""
    walked = [row[2:] for row in PRODUCT if row[:2] == (way, precision)]
    assert len(walked) == 6
    for stage, accumulation, when in walked:
        with noted(stage, accumulation, when):
            stays_what_it_is(stage, PRECISIONS[precision], accumulation, WAYS[way], when)


TARGETS = {"auto": r"|blocks\.\d", "module": "", "named": r"|blocks\.\d|frozen"}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("way", TARGETS)
def test_with_hooks_on_what_is_compiled_only_it_is_compiled_and_stays_what_it_is(way: str) -> None:
    """The product above puts hooks inside of what is compiled too, so that most of it must run as it is written."""
    for stage, precision in itertools.product((0, 1, 2, 3), ("fp32", "bf16")):
        with noted(stage, precision):
            at = functools.partial(re.fullmatch, TARGETS[way])
            graphs = stays_what_it_is(stage, PRECISIONS[precision], 2, WAYS[way], "before", at=at, order=by_graph)
            assert graphs > 0


def by_graph(heard: list[Heard]) -> tuple[list[Heard], Counter[Heard]]:
    """Hooks of modules in their order. Those of parameters, without: torch gives all gradients of a graph at once."""
    of_parameters = ("gradient", "accumulated")
    return [one for one in heard if one.kind not in of_parameters], Counter(h for h in heard if h.kind in of_parameters)


def stays_what_it_is(
    stage: int,
    precision: dict[str, Any],
    accumulation: int,
    compiled: dict[str, Any],
    when: str,
    *,
    at: Callable[[str], Any] = lambda _: True,
    order: Callable[[list[Heard]], object] = list,
) -> int:
    """The number of graphs that were made."""
    model, reference = (seeded(blocks=2) for _ in range(2))
    heard, expected = [], []
    if when == "before":
        listen(model, heard, at=at)
    before = face(model)
    engine = sheer.initialize(model=model, config=config(stage, accumulation, precision, compiled))[0]
    if when == "after":
        listen(model, heard, at=at)
    listen(reference, expected, at=at)
    case = Case(stage=stage, world=2, rank=sheer.testing.rank(), accumulation=accumulation)
    for batch in batches(2, size=case.global_batch):
        for ranks in case.micro_batches(batch):
            engine.backward(engine(ranks[case.rank]))
            engine.step()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision is AUTOCAST):
                loss = reference(ranks[case.rank])
            loss.backward()
    assert order(heard) == order(expected)
    assert engine.module is model
    assert face(model) == before
    graphs = engine.compile_report.graphs
    engine.destroy()
    assert face(model) == before
    assert not any(SLOT in vars(child) for child in model.modules())
    heard.clear()
    expected.clear()
    for module in (model, reference):
        module(batch[:2]).backward()
    assert heard == expected
    return graphs


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_hooks_see_and_change_gradients_as_they_do_without_an_engine(stage: int) -> None:
    """Also those that were put on parameters after `initialize`, and so run after the engine's own."""

    def clamp(param: nn.Parameter) -> None:
        param.grad.clamp_(-0.01, 0.01)

    def double(param: nn.Parameter) -> None:
        param.grad = param.grad * 2

    def meddle(module: nn.Module) -> None:
        for name, param in module.named_parameters():
            if param.requires_grad:
                param.register_hook(lambda grad: grad * 0.5)
                param.register_post_accumulate_grad_hook(clamp)
                if name.endswith("bias"):
                    param.register_post_accumulate_grad_hook(double)

    model, reference = odd(), odd()
    case = Case(stage=stage, world=2, rank=sheer.testing.rank())
    engine = sheer.initialize(model=model, config=config(stage, 1))[0]
    meddle(model)
    plain = [reference, odd()]  # one per rank: what hooks do is not linear
    for module in plain:
        meddle(module)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    for batch in batches(3, size=case.global_batch):
        ranks = case.micro_batches(batch)[0]
        engine.backward(engine(ranks[case.rank]))
        engine.step()
        plain[1].load_state_dict(reference.state_dict())
        for module, tokens in zip(plain, ranks, strict=True):
            module.zero_grad()
            module(tokens).backward()
        for one, other in zip(plain[0].parameters(), plain[1].parameters(), strict=True):
            if one.grad is not None:
                one.grad.add_(other.grad).div_(2)
        optimizer.step()
    ours = values(model)
    for name, theirs in reference.named_parameters():
        torch.testing.assert_close(
            ours[name], theirs.detach(), rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("compiled", [{}, COMPILED], ids=["eager", "compiled"])
@pytest.mark.parametrize("stage", [0, 2])
def test_copies_are_plain_and_independent(stage: int, compiled: dict[str, Any]) -> None:
    model = odd()
    engine = sheer.initialize(model=model, config=config(stage, 1, compiled))[0]
    tokens = batches(1, size=2)[0]
    engine.backward(engine(tokens))
    engine.step()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = {
        "deepcopy": copy.deepcopy(engine.module),
        "pickle": pickle.loads(pickle.dumps(engine.module)),
        "torch.save": torch.load(file, weights_only=False),
    }
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    for how, twin in copies.items():
        assert type(twin) is Odd, how
        assert twin.head.weight is twin.embed.weight, how
        assert not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in twin.parameters()), how
        assert {key: value.tolist() for key, value in twin.state_dict().items()} == {
            key: value.tolist() for key, value in expected.items()
        }, how
        optimizer = torch.optim.SGD(twin.parameters(), lr=1.0)
        twin(tokens).backward()
        optimizer.step()
        assert not torch.equal(twin.embed.weight, model.embed.weight), how
    for key, value in expected.items():
        assert torch.equal(model.state_dict()[key], value), key
    engine.backward(engine(tokens))  # and training goes on
    assert engine.step().grad_norm > 0


def test_attributes_go_both_ways() -> None:
    model = odd()
    model.vocabulary = 31
    engine = sheer.initialize(model=model, config=config(0, 1))[0]
    assert engine.vocabulary == 31
    assert engine.embed is model.embed
    assert engine.parameters
    model.vocabulary = 32
    assert engine.vocabulary == 32
    engine.module.extra = "set through the engine"
    assert model.extra == "set through the engine"
    engine.eval()
    assert not model.training
    engine.train()
    assert model.training
    with pytest.raises(AttributeError, match=r"neither the engine nor its module \(Odd\) has an attribute 'nonsense'"):
        _ = engine.nonsense
    assert not isinstance(engine, nn.Module)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_are_aligned_and_state_dicts_are_ordinary(stage: int) -> None:
    for precision in (FP32, BF16):
        model = odd()
        engine = sheer.initialize(model=model, config=config(stage, 1, precision))[0]
        other = odd(seed=3)
        with sheer.zero.GatheredParameters(model):
            for name, param in model.named_parameters():
                # The memory that a gathered parameter gets is the allocator's, which aligns to 64 bytes here.
                assert param.data_ptr() % (64 if stage == 3 else 256) == 0, (name, precision)
                assert param.is_leaf
                assert param.is_contiguous()
            model.load_state_dict(other.state_dict())
        assert torch.equal(values(model)["embed.weight"], other.embed.weight.to(model.embed.weight.dtype))
        engine.destroy()
