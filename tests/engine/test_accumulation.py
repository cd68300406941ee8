"""Who decides when a step ends, and what a user does to gradients before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import sheer
import sheer.testing
from sheer.errors import DataError, UsageError
from tests.engine.models import batches, odd
from tests.engine.oracle import Case, assert_same_model, start
from tests.engine.test_backward import SGD, TOLERANCE, here, ours, plain
from tests.pairs import beginning, noted, pairs

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def once(call: Any, module: Any, tokens: torch.Tensor, back: Callable[..., None]) -> None:
    back(call(tokens))


def assert_same(model: nn.Module, reference: nn.Module) -> None:
    reference.seen.copy_(model.seen)  # counted per rank
    assert_same_model(model, reference, **TOLERANCE)


# --- whose boundary ---------------------------------------------------------------------------------------------------


OUTSIDE = pairs((1, 2), (0, 1, 2, 3), (True, False))


@pytest.mark.world_size(1, 2)
def test_a_boundary_decided_from_outside(world_size: int) -> None:
    for stage, averaged_by_us in beginning(world_size, OUTSIDE):
        with noted(stage, averaged_by_us):
            decided_from_outside(stage, averaged_by_us)


def decided_from_outside(stage: int, averaged_by_us: bool) -> None:
    """As accelerate does: `step` is called at boundaries only, and the loss may be averaged already."""
    case = here(stage=stage, accumulation=3, clip=0.5)
    model, reference = odd(), odd()
    data = batches(3, size=case.global_batch)
    engine = start(model, case)
    for batch in data:
        for number, ranks in enumerate(case.micro_batches(batch)):
            engine.set_gradient_accumulation_boundary(number == 2)
            loss = engine(ranks[case.rank])
            engine.backward(loss if averaged_by_us else loss / 3, scale_wrt_gas=averaged_by_us)
            if number == 2:
                result = engine.step()
        assert result.micro_batches == 3
    plain(reference, case, data, once)
    assert_same(model, reference)
    assert engine.global_samples == 3 * case.global_batch
    engine.set_gradient_accumulation_boundary(None)
    ours(engine, case, data[:1], once)
    assert engine.global_steps == 4


@pytest.mark.world_size(2)
@STAGES
@pytest.mark.parametrize("way", ["engine", "output", "module"])
def test_no_sync(stage: int, way: str) -> None:
    """As with DDP: sums, not averages, over what the user accumulates himself."""
    case = here(stage=stage, accumulation=1, micro=2)
    model, reference = odd(), odd()
    engine = start(model, case)
    optimizer = torch.optim.SGD(reference.parameters(), **SGD)
    call = engine.module if way == "module" else engine
    for batch in batches(2, size=3 * case.world * case.micro):
        parts = [part.split(case.micro) for part in batch.split(case.world * case.micro)]
        engine.traffic.log = []
        with engine.no_sync():
            for ranks in parts[:2]:
                loss = call(ranks[case.rank])
                engine.backward(loss) if way == "engine" else loss.backward()
            with pytest.raises(UsageError, match="step inside no_sync"):
                engine.step()
            with pytest.raises(UsageError, match="step inside no_sync"):
                engine.flush()
        assert [entry for entry in engine.traffic.log if entry.op != "all_gather"] == []
        loss = call(parts[2][case.rank])
        engine.backward(loss) if way == "engine" else loss.backward()
        engine.step()
        for ranks in parts:
            for tokens in ranks:
                (reference(tokens) / case.world).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(model, reference)


@pytest.mark.world_size(2)
@STAGES
def test_everything_in_no_sync_is_reduced_by_the_step(stage: int) -> None:
    case = here(stage=stage)
    model, reference = odd(), odd()
    data = batches(2, size=case.global_batch)
    engine = start(model, case)
    for batch in data:
        with engine.no_sync():
            engine.backward(engine(case.micro_batches(batch)[0][case.rank]))
        engine.step()
    plain(reference, case, data, once)
    assert_same(model, reference)


class Named(nn.Module):
    """A module called with several arguments, which returns its loss in a mapping or an object."""

    def __init__(self, *, returns: str) -> None:
        super().__init__()
        self.inner, self.returns = odd(), returns

    def forward(self, tokens: torch.Tensor, factor: float = 1.0) -> Any:
        loss = self.inner(tokens) * factor
        if self.returns == "mapping":
            return {"loss": loss, "logits": None}
        return type("Output", (), {"loss": loss})() if self.returns == "object" else loss


SHAPES: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda tokens: tokens,
    "tuple": lambda tokens: (tokens, 1.0),
    "mapping": lambda tokens: {"factor": 1.0, "tokens": tokens},
}
BATCHES = pairs((1, 2), (0, 1, 2, 3), tuple(SHAPES), ("tensor", "mapping", "object"))


@pytest.mark.world_size(1, 2)
def test_train_batch_equals_plain(world_size: int) -> None:
    for stage, shape, returns in beginning(world_size, BATCHES):
        case = here(stage=stage, accumulation=2)
        model, reference = Named(returns=returns), odd()
        data = batches(2, size=case.global_batch)
        mine = iter([SHAPES[shape](ranks[case.rank]) for batch in data for ranks in case.micro_batches(batch)])
        with noted(stage, shape, returns):
            engine = start(model, case)
            means = [engine.train_batch(mine) for _ in data]
            with torch.no_grad():
                expected = torch.stack([odd()(part) for part in data[0].split(case.micro)]).mean()
            torch.testing.assert_close(means[0], expected)
            assert float(means[1]) == engine.last_step.loss
            plain(reference, case, data, once)
            assert_same(model.inner, reference)
        engine.destroy()


@pytest.mark.world_size(2)
@STAGES
def test_leftovers_wait_for_flush(stage: int) -> None:
    case = here(stage=stage, accumulation=3, clip=0.5)
    model, reference = odd(), odd()
    data = batches(2, size=case.global_batch)
    optimizer = torch.optim.SGD(reference.parameters(), **SGD)
    mine = [ranks[case.rank] for batch in data for ranks in case.micro_batches(batch)][:5]
    engine = start(model, case)
    feed = iter(mine)
    engine.train_batch(feed)
    with pytest.raises(StopIteration, match=r"2 of 3 micro-batches .*engine.flush\(\) applies them"):
        engine.train_batch(feed)
    with pytest.raises(UsageError, match="save_checkpoint in the middle of a step"):
        engine.save_checkpoint("nowhere")
    result = engine.flush()
    assert (result.micro_batches, result.step) == (2, 2)
    assert engine.flush() is None
    assert engine.global_samples == 5 * case.micro * case.world
    plain(reference, case, data[:1], once, optimizer=optimizer)
    shorter = case._replace(accumulation=2)
    plain(reference, shorter, [data[1][: shorter.global_batch]], once, optimizer=optimizer)
    assert_same(model, reference)


def endless(batch: torch.Tensor) -> Iterator[torch.Tensor]:
    while True:
        yield batch


def test_train_batch_goes_on_after_a_step_by_hand() -> None:
    case = Case(accumulation=2)
    engine = start(odd(), case)
    batch = batches(1, size=2)[0]
    engine.backward(engine(batch))
    engine.step()
    feed = endless(batch)
    engine.train_batch(feed)  # takes one, not two
    assert (engine.micro_steps, engine.global_steps) == (2, 1)


def test_bad_batches_and_losses_are_named() -> None:
    engine = start(odd(), Case())
    batch = batches(1, size=2)[0]
    with pytest.raises(DataError, match=r"needs an iterator.*list"):
        engine.train_batch([batch])
    with pytest.raises(DataError, match="needs training_data"):
        engine.train_batch()
    with pytest.raises(UsageError, match="loss as a tensor, not float"):
        engine.backward(1.0)
    with pytest.raises(UsageError, match=r"scalar loss, not shape \(2, 5\)"):
        engine.backward(torch.ones(2, 5, requires_grad=True))
    with pytest.raises(UsageError, match="no parameter that trains"):
        engine.backward(engine(batch).detach())
    loss = engine(batch)
    engine.backward(loss * float("nan"))  # not a number is the user's business, not an error
    assert engine.step() is not None


def test_a_module_without_a_loss_is_named() -> None:
    engine = start(nn.ModuleDict({"a": nn.Linear(2, 2)}), Case())
    engine.module.forward = lambda x: [x]
    with pytest.raises(UsageError, match=r"returns its loss .* it returned list"):
        engine.train_batch(iter([torch.ones(1)]))


@pytest.mark.parametrize("call", ["step", "flush", "train_batch"])
def test_a_step_needs_an_optimizer(call: str) -> None:
    config = Case().config()
    del config["optimizer"]
    engine = sheer.initialize(model=odd(), config=config)[0]
    engine.backward(engine(batches(1, size=2)[0]))
    arguments = [iter([batches(1, size=2)[0]])] if call == "train_batch" else []
    with pytest.raises(UsageError, match="this engine has no optimizer"):
        getattr(engine, call)(*arguments)


# --- what a user does to gradients ------------------------------------------------------------------------------------


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("way", ["engine", "output", "module"])
def test_gradients_can_be_changed_before_the_step_where_they_are_whole(accumulation: int, way: str) -> None:
    """Stage 0: what `.grad` shows after the last backward is the mean gradient, and what is done to it counts."""

    def change(module: nn.Module, number: int) -> None:
        if number + 1 < accumulation:
            return
        module.embed.weight.grad = None
        module.gain.grad = torch.full_like(module.gain, 0.25)
        module.never.grad = torch.ones_like(module.never)
        module.blocks[0].up.weight.grad.mul_(-1)
        module.blocks[1].down.weight.grad = module.blocks[1].down.weight.grad * 3
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)

    case = here(stage=0, accumulation=accumulation)
    model, reference = odd(), odd()
    data = batches(3, size=case.global_batch)
    engine = start(model, case)
    norms = ours(engine, case, data, once, way=way, after=change)
    torch.testing.assert_close(norms, plain(reference, case, data, once, after=change), rtol=1e-5, atol=1e-6)
    assert_same(model, reference)


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_can_be_changed_between_micro_batches_where_they_are_whole(stage: int) -> None:
    """Stages 0 and 1: before the boundary `.grad` is this rank's own sum."""

    def change(module: nn.Module, number: int) -> None:
        if number == 1:
            module.embed.weight.grad = None
            module.blocks[0].up.weight.grad.mul_(-1)
            module.blocks[1].down.weight.grad = module.blocks[1].down.weight.grad * 3
        if number == 0:
            module.blocks[2].zero_grad()

    case = here(stage=stage, accumulation=3)
    model, reference = odd(), odd()
    data = batches(3, size=case.global_batch)
    engine = start(model, case)
    norms = ours(engine, case, data, once, after=change)
    torch.testing.assert_close(norms, plain(reference, case, data, once, after=change), rtol=1e-5, atol=1e-6)
    assert_same(model, reference)


@pytest.mark.world_size(1, 2)
@STAGES
@pytest.mark.parametrize("through", ["engine", "optimizer"])
def test_zero_grad_starts_the_step_anew(stage: int, through: str, caplog: pytest.LogCaptureFixture) -> None:
    case = here(stage=stage, accumulation=2)
    model, reference = odd(), odd()
    data = batches(3, size=case.global_batch)
    engine = start(model, case)
    forget = engine.zero_grad if through == "engine" else engine.optimizer.zero_grad
    stray = case.micro_batches(data[2])[0][case.rank]
    for batch in data[:2]:
        engine.backward(3 * engine(stray))
        engine.step()
        forget()
        assert all(param.grad is None for param in model.parameters())
        engine.set_train_batch_size(case.global_batch)  # we are between steps
        ours(engine, case, [batch], once)
    said = [record.getMessage() for record in caplog.records if "zero_grad in the middle" in record.getMessage()]
    assert len(said) == 2 * (case.rank == 0)
    plain(reference, case, data[:2], once)
    assert_same(model, reference)


@pytest.mark.world_size(2)
@STAGES
def test_zero_grad_before_the_backward_of_every_step_is_silent(stage: int, caplog: pytest.LogCaptureFixture) -> None:
    case = here(stage=stage)
    model, reference = odd(), odd()
    data = batches(3, size=case.global_batch)
    engine = start(model, case)
    for batch in data:
        engine.optimizer.zero_grad()
        ours(engine, case, [batch], once)
    plain(reference, case, data, once)
    assert_same(model, reference)
    assert [record.getMessage() for record in caplog.records if "forgotten" in record.getMessage()] == []


# --- several engines --------------------------------------------------------------------------------------------------


TURNS = pairs((1, 2), (0, 1, 2, 3), (False, True))


@pytest.mark.world_size(1, 2)
def test_two_engines_take_turns(world_size: int) -> None:
    for stage, freezes in beginning(world_size, TURNS):
        with noted(stage, freezes):
            take_turns(stage, freezes)


def take_turns(stage: int, freezes: bool) -> None:
    """A GAN: the generator's loss flows through the critic, whose gradients of it are forgotten or never made."""

    def make() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        widths = ((4, 9, 6), (6, 7, 1))
        maker, critic = (nn.Sequential(nn.Linear(a, b), nn.Tanh(), nn.Linear(b, c)) for a, b, c in widths)
        return maker, critic

    case = here(stage=stage, clip=0.7)
    (maker, critic), (plain_maker, plain_critic) = make(), make()
    makes, judges = start(maker, case), start(critic, case)
    optimizers = [torch.optim.SGD(module.parameters(), **SGD) for module in (plain_maker, plain_critic)]
    generator = torch.Generator().manual_seed(2)
    layouts = []
    for _ in range(4):
        noise = torch.randn(2 * case.world, 4, generator=generator)
        real = torch.randn(2 * case.world, 6, generator=generator)
        mine = slice(2 * case.rank, 2 * case.rank + 2)

        judges.zero_grad()
        fake = makes(noise[mine])
        judges.backward((judges(fake.detach()) - judges(real[mine])).mean())
        judges.step()
        critic.requires_grad_(not freezes)
        makes.backward(-judges(fake).mean())
        critic.requires_grad_(True)
        makes.step()
        layouts.append(judges.layout)

        optimizers[1].zero_grad()
        fake = plain_maker(noise)
        (plain_critic(fake.detach()) - plain_critic(real)).mean().backward()
        nn.utils.clip_grad_norm_(plain_critic.parameters(), 0.7)
        optimizers[1].step()
        optimizers[0].zero_grad()
        (-plain_critic(fake)).mean().backward()
        nn.utils.clip_grad_norm_(plain_maker.parameters(), 0.7)
        optimizers[0].step()
    assert_same_model(maker, plain_maker, **TOLERANCE)
    assert_same_model(critic, plain_critic, **TOLERANCE)
    assert all(one is layouts[0] for one in layouts), "freezing for half an iteration makes no new plan"
