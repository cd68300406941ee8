"""Stage 3 where values are wanted, or left, outside the call of their block: right, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sheer
import sheer.testing
from sheer.errors import UsageError
from tests.engine.models import Block, batches
from tests.engine.oracle import Case, Step, adamw, assert_same_model, engine_run, plain_run, start

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
EAGERLY = {"compile": {"enabled": True, "backend": "aot_eager"}}


def here(**fields: Any) -> Case:
    return Case(stage=3, world=sheer.testing.world_size(), rank=sheer.testing.rank(), **fields)


class Leaky(Block):
    """Leaves a second result, which is made after its output, as an attribute."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.probe = nn.Linear(width, 1)
        self.left: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.left = self.probe(y).square().mean()
        return y


class Deep(nn.Module):
    def __init__(self, body: Callable[[Deep, torch.Tensor], torch.Tensor], *, block: type[Block] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(31, 12)
        self.blocks = nn.ModuleList([block(12) for _ in range(4)])
        self.head = nn.Linear(12, 31)
        self.body = body
        self.calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.body(self, self.embed(tokens))
        loss = F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())
        self.calls += 1
        for block in self.blocks:
            if isinstance(block, Leaky):
                loss = loss + block.left
        return loss


def through(model: Deep, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = block(x)
    return x


def product(model: Deep, x: torch.Tensor) -> torch.Tensor:
    return through(model, x) * model.blocks[0].norm.weight


def before_and_after(model: Deep, x: torch.Tensor) -> torch.Tensor:
    x = through(model, F.linear(x, model.blocks[2].down.weight.T, bias=model.blocks[2].up.bias)[..., :12])
    return x + torch.cat([model.blocks[1].norm.bias, model.blocks[3].norm.bias]).mean()


def unhooked(model: Deep, x: torch.Tensor) -> torch.Tensor:
    """A block that is not called but by its forward."""
    for number, block in enumerate(model.blocks):
        x = block.forward(x) if number == 2 else block(x)
    return x


def without_a_gradient(model: Deep, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        size = 1 + model.blocks[1].up.weight.norm() + model.blocks[3].up.weight.data.abs().max()
    return through(model, x) * size


def sometimes(model: Deep, x: torch.Tensor) -> torch.Tensor:
    x = through(model, x)
    return x * model.blocks[1].norm.weight if model.calls >= 2 else x


def assert_like_the_plain_loop(case: Case, **how: Any) -> Any:
    model, reference = Deep(**how), Deep(**how)
    data = batches(4, size=case.global_batch)

    def on_every_rank(module: nn.Module, tokens: torch.Tensor, rank: int, number: int) -> torch.Tensor:
        module.calls = calls  # counted as one rank counts
        return module(tokens)

    engine = start(model, case)
    ours = engine_run(engine, case, data)
    optimizer, expected = adamw(reference), []
    for calls, batch in enumerate(data):  # noqa: B007
        expected += plain_run(reference, case, [batch], optimizer=optimizer, call=on_every_rank)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(expected), **TOLERANCE)
    assert_same_model(model, reference, **TOLERANCE)
    return engine


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("body", "moved"),
    [(product, 1), (before_and_after, 4), (unhooked, 6), (without_a_gradient, 2), (sometimes, 0)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_parameters_may_be_read_outside_their_block(body: Any, moved: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="sheer")
    engine = assert_like_the_plain_loop(here(), body=body)
    outside = {slot.fqn for bucket in engine.layout.buckets if not bucket.key.unit for slot in bucket.slots}
    assert len([fqn for fqn in outside if fqn.startswith("blocks.")]) == moved
    said = [record for record in caplog.records if "read outside the call of their block" in record.getMessage()]
    assert len(said) == (moved > 0 and sheer.testing.rank() == 0)
    with torch.no_grad():
        engine(batches(1, size=2)[0])
    engine.empty_partition_cache()
    assert engine._runtime.gathering.vault.live == 0


@pytest.mark.world_size(2)
@pytest.mark.parametrize("extra", [{}, EAGERLY], ids=["eager", "compiled"])
def test_what_a_block_leaves_elsewhere_than_in_its_output_has_its_backward(extra: dict[str, Any]) -> None:
    engine = assert_like_the_plain_loop(here(extra=extra), body=through, block=Leaky)
    assert engine._runtime.gathering.vault.live == 0


class Peeking(Block):
    """Reads a parameter of another block in its own call."""

    other: list[Block]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.other[0].norm.weight)


@pytest.mark.world_size(2)
def test_a_block_that_reads_another_ones_parameter_is_told_how() -> None:
    def build() -> Deep:
        model = Deep(through, block=Peeking)
        for block in model.blocks:
            block.other = [model.blocks[3]]
        return model

    case, model, reference = here(), build(), build()
    engine = start(model, case)
    data = batches(3, size=case.global_batch)
    with pytest.raises(UsageError, match=r"of blocks\.3 was read inside the call of another block.*register_external"):
        engine(data[0][:2])
    sheer.zero.register_external_parameter(model.blocks[0], model.blocks[3].norm.weight)
    ours = engine_run(engine, case, data)
    expected = plain_run(reference, case, data, optimizer=adamw(reference))
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(expected), **TOLERANCE)
    assert_same_model(model, reference, **TOLERANCE)


class InPlace(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x).exp()
        y.mul_(2)
        return y


@pytest.mark.world_size(2)
def test_changing_in_place_what_autograd_needs_is_refused_as_ever() -> None:
    case = here()
    engine = start(Deep(through, block=InPlace), case)
    loss = engine(batches(1, size=2)[0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(loss)


@pytest.mark.world_size(2)
def test_what_a_user_compiles_stays_compiled() -> None:
    case, runs = here(), []

    def backend(graph: Any, _inputs: Any) -> Any:
        return lambda *args: runs.append(graph) or graph(*args)

    model, reference = Deep(through), Deep(through)
    model.blocks[1].compile(backend=backend)
    engine = start(model, case)
    model.blocks[2].compile(backend=backend)
    model.head.compile(backend=backend)
    data = batches(3, size=case.global_batch)
    ours = engine_run(engine, case, data)
    assert len(runs) == 3 * len(data)
    expected = plain_run(reference, case, data, optimizer=adamw(reference))
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(expected), **TOLERANCE)
    engine.destroy()
    assert model.blocks[1]._compiled_call_impl is not None
    assert model.blocks[0]._compiled_call_impl is None


@pytest.mark.world_size(2)
def test_a_parameter_read_for_the_loss_is_refused_or_right() -> None:
    case, model, reference = here(), Deep(through), Deep(through)
    engine, optimizer = start(model, case), adamw(reference)
    data = batches(5, size=case.global_batch)

    def with_decay(module: Any, tokens: torch.Tensor, rank: int, number: int) -> torch.Tensor:
        inner = module if isinstance(module, Deep) else module.module
        loss = module(tokens)
        return loss + 0.1 * (inner.blocks[1].up.weight.square().sum() + inner.head.weight.square().sum())

    ours = engine_run(engine, case, data[:1])
    expected = plain_run(reference, case, data[:1], optimizer=optimizer)
    with pytest.raises(UsageError, match=r"'blocks\.1\.up\.weight' was read after the forward, for the loss"):
        engine_run(engine, case, data[1:2], call=with_decay)
    for batch in data[1:3]:
        with sheer.zero.GatheredParameters(model.blocks[1]):
            loss = with_decay(engine, case.micro_batches(batch)[0][case.rank], case.rank, 0)
            engine.backward(loss)
        result = engine.step()
        ours.append(Step(result.loss, result.grad_norm))
    sheer.zero.register_external_parameter(model, model.blocks[1].up.weight)
    ours += engine_run(engine, case, data[3:], call=with_decay)
    expected += plain_run(reference, case, data[1:], optimizer=optimizer, call=with_decay)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(expected), **TOLERANCE)
    assert_same_model(model, reference, **TOLERANCE)
