"""Gradients take every way that autograd has, and arrive as in a plain loop: stages, worlds, accumulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sheer
import sheer.testing
from sheer.errors import UsageError
from tests.engine.models import Block, batches, odd
from tests.engine.oracle import Case, assert_same_model, start
from tests.pairs import beginning, noted, pairs

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}

Back = Callable[..., None]
Body = Callable[[Any, nn.Module, torch.Tensor, Back], None]
"""(what to call, the module, tokens, backward): the user's code for one micro-batch, with an engine and without."""


After = Callable[[nn.Module, int], object]
"""(module, micro-batch number): what the user does between backward and step."""


def nothing(module: nn.Module, number: int) -> None:
    pass


# Not Adam, whose first steps turn the last bit of a small gradient into a step of full length.
SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}


def here(**fields: Any) -> Case:
    extra = {"optimizer": {"type": "SGD", "params": SGD}, **fields.pop("extra", {})}
    return Case(world=sheer.testing.world_size(), rank=sheer.testing.rank(), extra=extra, **fields)


def plain(
    module: nn.Module,
    case: Case,
    data: Sequence[torch.Tensor],
    body: Body,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    after: After = nothing,
) -> list[float]:
    """Gradient norms of training with `body` in this process alone."""
    optimizer = optimizer or torch.optim.SGD(module.parameters(), **SGD)
    count, norms = case.world * case.accumulation, []
    for batch in data:
        for number, ranks in enumerate(case.micro_batches(batch)):
            for tokens in ranks:
                body(module, module, tokens, lambda loss, **options: (loss / count).backward(**options))
            after(module, number)
        params = [p for p in module.parameters() if p.grad is not None]
        norms.append(float(nn.utils.clip_grad_norm_(params, case.clip or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def ours(
    engine: Any,
    case: Case,
    data: Sequence[torch.Tensor],
    body: Body,
    *,
    way: str = "engine",
    after: After = nothing,
) -> list[float]:
    """Gradient norms of training with `body` through `engine`."""
    call = engine.module if way == "module" else engine
    back = engine.backward if way == "engine" else lambda loss, **options: loss.backward(**options)
    norms = []
    for batch in data:
        for number, ranks in enumerate(case.micro_batches(batch)):
            body(call, engine.module, ranks[case.rank], back)
            after(engine.module, number)
            result = engine.step()
        norms.append(result.grad_norm)
    return norms


def assert_equals_plain(case: Case, body: Body, *, make: Callable[[], nn.Module] = odd, **more: Any) -> None:
    model, reference = make(), make()
    data = batches(2, size=case.global_batch)
    engine = start(model, case)
    norms = ours(engine, case, data, body, **more)
    torch.testing.assert_close(norms, plain(reference, case, data, body), rtol=1e-5, atol=1e-6)
    for name, buffer in reference.named_buffers():
        buffer.copy_(model.get_buffer(name))  # counted per rank
    assert_same_model(model, reference, **TOLERANCE)
    engine.destroy()


# --- what a user may do in one micro-batch ----------------------------------------------------------------------------


def once(call: Any, module: Any, tokens: torch.Tensor, back: Back) -> None:
    back(call(tokens))


def two_losses(call: Any, module: Any, tokens: torch.Tensor, back: Back) -> None:
    back(call(tokens))
    back(0.5 * call(tokens.flip(1), branch=True))


def two_forwards_then_two_backwards(call: Any, module: Any, tokens: torch.Tensor, back: Back) -> None:
    first, second = call(tokens, branch=True), call(tokens.flip(1))
    back(first)
    back(second)


def one_loss_of_two_forwards(call: Any, module: Any, tokens: torch.Tensor, back: Back) -> None:
    back(call(tokens) + 0.3 * call(tokens.flip(1), branch=True))


def retained(call: Any, module: Any, tokens: torch.Tensor, back: Back) -> None:
    loss = call(tokens)
    back(loss, retain_graph=True)
    back(0.5 * loss)


def gradient_penalty(call: Any, module: Any, tokens: torch.Tensor, back: Back) -> None:
    loss = call(tokens)
    grads = torch.autograd.grad(loss, [module.blocks[0].up.weight, module.embed.weight], create_graph=True)
    back(loss + sum(0.1 * grad.square().sum() for grad in grads))


def looks_before(call: Any, module: Any, tokens: torch.Tensor, back: Back) -> None:
    loss = call(tokens)
    torch.autograd.grad(loss, list(module.blocks.parameters()), retain_graph=True)
    back(loss)


def looks_after(call: Any, module: Any, tokens: torch.Tensor, back: Back) -> None:
    loss = call(tokens)
    back(loss, retain_graph=True)
    torch.autograd.grad(loss, list(module.blocks.parameters()))


def weights_in_the_loss(call: Any, module: Any, tokens: torch.Tensor, back: Back) -> None:
    with sheer.zero.GatheredParameters(module):
        back(call(tokens) + 1e-2 * sum(p.square().sum() for p in module.parameters() if p.requires_grad))


def weights_first(call: Any, module: Any, tokens: torch.Tensor, back: Back) -> None:
    """A parameter that the forward does not use gets its gradient before any of the forward's graph runs."""
    loss = call(tokens)
    back(module.never.square().sum() + loss)


def weights_alone(call: Any, module: Any, tokens: torch.Tensor, back: Back) -> None:
    with sheer.zero.GatheredParameters(module.never):
        back(1e-2 * module.never.square().sum())
    back(call(tokens))


BODIES = [
    once,
    two_losses,
    two_forwards_then_two_backwards,
    one_loss_of_two_forwards,
    retained,
    gradient_penalty,
    looks_before,
    looks_after,
    weights_in_the_loss,
    weights_first,
    weights_alone,
]
SEVERAL_BACKWARDS = {two_losses, two_forwards_then_two_backwards, retained, weights_alone}


def taken(stage: int, way: tuple[str, int], body: Body) -> bool:
    """Not what is refused, see below."""
    return not (way[0] == "module" and stage == 0 and body in SEVERAL_BACKWARDS)


WAYS = (("engine", 1), ("engine", 2), ("output", 2), ("module", 1))
EVERY_BODY = pairs((0, 1, 2, 3), WAYS, BODIES, allowed=taken)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_body_equals_plain(stage: int) -> None:
    for (way, accumulation), body in beginning(stage, EVERY_BODY):
        with noted(way, accumulation, body.__name__):
            assert_equals_plain(here(stage=stage, accumulation=accumulation, clip=0.5), body, way=way)


@pytest.mark.world_size(2)
def test_a_backward_nobody_announced_never_adds_to_a_gradient_that_is_shown_reduced() -> None:
    case = here(stage=0)
    engine, reference = start(odd(), case), odd()
    data = batches(2, size=case.global_batch)
    mine = [ranks[case.rank] for batch in data for ranks in case.micro_batches(batch)]
    engine.module(mine[0]).backward()
    with pytest.raises(UsageError, match=r"a backward reached it .* had been reduced.*Call the model through"):
        engine.module(mine[0]).backward()
    ours(engine, case, data[1:], once)  # and the engine goes on, without what it could not tell apart
    plain(reference, case, data[1:], once)
    reference.seen.copy_(engine.module.seen)
    assert_same_model(engine.module, reference, **TOLERANCE)


# --- kinds of models --------------------------------------------------------------------------------------------------


class Recomputed(nn.Module):
    """Checkpointed segments: nested, and one block in two of them."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.embed = nn.Embedding(31, 12)
        self.blocks = nn.ModuleList([Block(12) for _ in range(4)])
        self.head = nn.Linear(12, 31)

    def segment(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.blocks[1], x, use_reentrant=self.reentrant)
        return self.blocks[2](self.blocks[0](x))

    def forward(self, tokens: torch.Tensor, *, branch: bool = False) -> torch.Tensor:
        x = self.blocks[0](self.embed(tokens))
        x = checkpoint(self.segment, x, use_reentrant=self.reentrant)
        x = checkpoint(self.blocks[2], x, use_reentrant=self.reentrant)
        if branch:
            x = self.blocks[3](x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


CHECKPOINTED = pairs(
    (0, 1, 2, 3), (False, True), (("engine", 1), ("output", 2)), (once, two_losses, one_loss_of_two_forwards)
)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_activation_checkpointing(stage: int) -> None:
    for reentrant, (way, accumulation), body in beginning(stage, CHECKPOINTED):
        case = here(stage=stage, accumulation=accumulation)
        with noted(reentrant, way, body.__name__):
            make = lambda reentrant=reentrant: seeded(lambda: Recomputed(reentrant=reentrant))  # noqa: E731
            assert_equals_plain(case, body, make=make, way=way)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_reentrant_checkpoints_around_the_engine(stage: int) -> None:
    """The module called directly: the innermost backward is the first that is seen."""
    make = lambda: seeded(lambda: Recomputed(reentrant=True))  # noqa: E731
    assert_equals_plain(here(stage=stage), once, make=make, way="module")


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_whole_engine_in_a_checkpoint(stage: int) -> None:
    """Its forward runs without a graph, and again inside the backward."""
    for reentrant in (False, True):

        def body(call: Any, module: Any, tokens: torch.Tensor, back: Back, reentrant: bool = reentrant) -> None:
            ticket = torch.ones((), requires_grad=True)
            back(checkpoint(lambda t: call(tokens) * t, ticket, use_reentrant=reentrant))

        assert_equals_plain(here(stage=stage, accumulation=2), body)


class Strange(nn.Module):
    """A sparse embedding, a channels_last convolution, and a parameter that is expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 9, sparse=True)
        self.conv = nn.Conv2d(5, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.tilt = nn.Parameter(torch.ones(1, 1, 3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        image = self.embed(tokens).view(-1, 5, 3, 3).to(memory_format=torch.channels_last)
        return (self.conv(image) * self.tilt.expand(4, 3, 3)).square().mean()


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sparse_and_strided_gradients(stage: int) -> None:
    def body(call: Any, module: Any, tokens: torch.Tensor, back: Back) -> None:
        back(call(tokens))
        back(call(tokens.flip(1)))

    case = here(stage=stage, accumulation=2)
    model, reference = seeded(Strange), seeded(Strange)
    reference.embed.sparse = (
        False  # torch's SGD with momentum knows no sparse gradients; ours are dense when it sees them
    )
    data = batches(3, size=case.global_batch)
    engine = start(model, case)
    torch.testing.assert_close(ours(engine, case, data, body), plain(reference, case, data, body), rtol=1e-5, atol=1e-6)
    assert_same_model(model, reference, **TOLERANCE)


@pytest.mark.world_size(2)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_create_graph_leaves_gradients_with_a_graph(stage: int) -> None:
    def body(call: Any, module: Any, tokens: torch.Tensor, back: Back) -> None:
        back(call(tokens), create_graph=True)
        back(call(tokens.flip(1)), create_graph=True)

    assert_equals_plain(here(stage=stage, accumulation=2), body, way="output")


# --- what is trained changes ------------------------------------------------------------------------------------------


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_freezing_and_unfreezing_between_steps(stage: int) -> None:
    """Momentum waits while a parameter is frozen, as it does in torch's optimizer."""
    case = here(stage=stage, accumulation=2, clip=0.5)
    model, reference = odd(), odd()
    engine, optimizer = start(model, case), torch.optim.SGD(reference.parameters(), **SGD)
    frozen_in_step = [("blocks.1",), ("blocks.1", "gain"), (), ("frozen", "blocks.0"), ("frozen",)]
    for names, batch in zip(frozen_in_step, batches(5, size=case.global_batch), strict=True):
        for module in (model, reference):
            for fqn, param in module.named_parameters():
                param.requires_grad_(not fqn.startswith(names) if names else not fqn.startswith("frozen"))
        norms = ours(engine, case, [batch], once)
        torch.testing.assert_close(
            norms, plain(reference, case, [batch], once, optimizer=optimizer), rtol=1e-5, atol=1e-6
        )
        reference.seen.copy_(model.seen)
        assert_same_model(model, reference, **TOLERANCE)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_freezing_in_the_middle_of_a_step_keeps_what_has_arrived(stage: int) -> None:
    def freeze(module: nn.Module, number: int) -> None:
        module.get_submodule("blocks.1").requires_grad_(number == 2)

    case = here(stage=stage, accumulation=3)
    model, reference = odd(), odd()
    data = batches(3, size=case.global_batch)
    engine = start(model, case)
    norms = ours(engine, case, data, once, after=freeze)
    torch.testing.assert_close(norms, plain(reference, case, data, once, after=freeze), rtol=1e-5, atol=1e-6)
    reference.seen.copy_(model.seen)
    assert_same_model(model, reference, **TOLERANCE)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_unfreezing_in_the_middle_of_a_step_is_said_and_waits_for_the_next(
    stage: int, caplog: pytest.LogCaptureFixture
) -> None:
    case = here(stage=stage, accumulation=2)
    model, reference = odd(), odd()
    data = batches(2, size=case.global_batch)
    engine, optimizer = start(model, case), torch.optim.SGD(reference.parameters(), **SGD)
    ours(engine, case, data[:1], once, after=lambda module, number: module.frozen.requires_grad_(True))
    said = [record.getMessage() for record in caplog.records if "middle of a step" in record.getMessage()]
    assert len(said) == (case.rank == 0)
    assert all("'frozen.weight'" in line and "next step" in line for line in said)
    plain(reference, case, data[:1], once, optimizer=optimizer)
    reference.frozen.requires_grad_(True)
    ours(engine, case, data[1:], once)
    plain(reference, case, data[1:], once, optimizer=optimizer)
    reference.seen.copy_(model.seen)
    assert_same_model(model, reference, **TOLERANCE)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [0, 2])
def test_evaluation_on_one_rank_communicates_nothing(stage: int) -> None:
    """Not even where parameters were frozen since, which the next step's first forward plans for together."""
    case = here(stage=stage)
    model, reference = odd(), odd()
    data = batches(2, size=case.global_batch)
    engine, optimizer = start(model, case), torch.optim.SGD(reference.parameters(), **SGD)
    ours(engine, case, data[:1], once)
    plain(reference, case, data[:1], once, optimizer=optimizer)
    for module in (model, reference):
        module.frozen.requires_grad_(True)
    engine.traffic.log = []
    if case.rank == 0:
        with torch.no_grad():
            engine(data[0])
    assert engine.traffic.log == []
    ours(engine, case, data[1:], once)
    plain(reference, case, data[1:], once, optimizer=optimizer)
    reference.seen.copy_(model.seen)
    assert_same_model(model, reference, **TOLERANCE)
