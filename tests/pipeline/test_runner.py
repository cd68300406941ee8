"""A pipeline is the plain loop: same losses, same gradients, whatever the schedule; and it stops as a whole."""

import copy
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from sheer import comm
from sheer.comm import CONTROL_BYTES, build_links
from sheer.errors import CommError, DataError, SheerError, UsageError
from sheer.pipeline.mail import routes
from sheer.pipeline.runner import Runner
from sheer.schedule import (
    Action,
    Kind,
    Schedule,
    forward_only,
    gpipe,
    in_flight,
    interleaved,
    one_f_one_b,
    validate,
    zero_bubble,
    zero_bubble_v,
)
from sheer.testing import rank
from tests.harness.late_work import late_collectives
from tests.pairs import beginning, noted, pairs
from tests.pipeline.structures import State

CPU = torch.device("cpu")
WIDTH = 6
F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT  # noqa: E741


def halved(schedule: Schedule) -> Schedule:
    """The same with every backward in halves, the second as late as the next step of the stage allows."""

    def halve(actions):
        found, waiting = [], []
        for action in actions:
            if action.kind is B:
                found += [action._replace(kind=I), *waiting]
                waiting = [action._replace(kind=W)]
            elif action.kind is Kind.REDUCE:
                found += [*waiting, action]
            else:
                found.append(action)
        return tuple(found)

    lists = tuple(halve(actions) for actions in schedule.actions)
    return validate(Schedule(f"{schedule.name} halved", *_numbers(schedule), schedule.placement, lists))


def chunked(stages: int, micro_batches: int, placement: tuple[int, ...]) -> Schedule:
    """Several chunks on a stage: all forwards chunk by chunk, then all backwards."""
    chunks = len(placement) // stages
    forth = [Action(F, k, c) for c in range(chunks) for k in range(micro_batches)]
    back = [Action(B, k, c) for c in reversed(range(chunks)) for k in range(micro_batches)]
    every = (*forth, *back, Action(Kind.REDUCE), Action(Kind.STEP))
    return validate(Schedule("chunked", stages, chunks, micro_batches, placement, (every,) * stages))


def _numbers(schedule):
    return schedule.stages, schedule.chunks, schedule.micro_batches


SCHEDULES = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zero_bubble,
    "zb-v": zero_bubble_v,
    "gpipe halved": lambda s, m: halved(gpipe(s, m)),
    "v": lambda s, m: chunked(s, m, (*range(s), *reversed(range(s)))),
}


class Layer(nn.Module):
    """Takes and gives a structure in which everything travels that may."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, carry: dict[str, Any]) -> dict[str, Any]:
        state, skip, mask = carry["state"], carry["skip"], carry["mask"]
        hidden = state.hidden + self.linear(self.norm(state.hidden)).tanh() * mask
        return {
            "state": State(hidden, state.step + 1),
            "skip": skip,
            "mask": mask,
            "extra": (carry["extra"][1], hidden.detach(), None),
        }


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)

    def forward(self, tokens):
        x = self.embed(tokens)
        return {"state": State(x), "skip": x * 2, "mask": (tokens > 3)[..., None], "extra": (1, 2.5, "text")}


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, carry):
        assert carry["state"].step == self.depth
        return self.head(carry["state"].hidden + carry["skip"])


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    made = [First(), *(Layer() for _ in range(count - 2)), Last()]
    made[-1].depth = count - 2
    return made


def loss_fn(output, label):
    return nn.functional.cross_entropy(output.flatten(0, 1), label.flatten())


def batches(count: int, seed: int = 0):
    """Other lengths and sizes each time."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1 + (k + seed) % 3, 4 + (2 * k) % 5) for k in range(count)]
    inputs = [torch.randint(0, 11, shape, generator=generator) for shape in shapes]
    return inputs, [torch.randint(0, 11, shape, generator=generator) for shape in shapes]


class Piece(NamedTuple):
    """What one stage holds: a list of layers per chunk."""

    chunks: list[list[nn.Module]]

    def run(self, carry, *, chunk):
        for layer in self.chunks[chunk]:
            carry = layer(carry)
        return carry


def cut(model: list[nn.Module], schedule: Schedule, stage: int) -> Piece:
    """Layers dealt evenly to the virtual stages."""
    count = len(schedule.placement)
    bounds = [round(v * len(model) / count) for v in range(count + 1)]
    return Piece([model[bounds[v] : bounds[v + 1]] for v in range(count) if schedule.placement[v] == stage])


def plain(model, inputs, labels):
    """The oracle."""
    losses = []
    for x, y in zip(inputs, labels, strict=True):
        for layer in model:
            x = layer(x)
        loss = loss_fn(x, y)
        loss.backward()
        losses.append(loss.detach())
    return losses


def build(schedule, piece, *, stage=None, **changes):
    axis = comm.data_axis()
    links = build_links(axis, routes(schedule))
    given = {"stage": axis.rank if stage is None else stage, "run": piece.run, "loss": loss_fn, "links": links}
    return Runner(schedule, **{**given, "device": CPU, **changes}), links


def check_step(runner, piece, reference, schedule, seed=0):
    inputs, labels = batches(schedule.micro_batches, seed)
    outcome = runner.step(inputs, labels)
    expected = plain(reference, inputs, labels)
    if schedule.placement[-1] == runner.stage:
        assert [float(a) for a in outcome.losses] == [float(b) for b in expected]
    else:
        assert outcome == ((), ())
    twins = cut(reference, schedule, runner.stage)
    for mine, theirs in zip(piece.chunks, twins.chunks, strict=True):
        for a, b in zip(nn.ModuleList(mine).parameters(), nn.ModuleList(theirs).parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)


ROWS = pairs((1, 2, 3, 4), (1, 2, 5), tuple(SCHEDULES))


@pytest.mark.world_size(1, 2, 3, 4)
def test_losses_and_gradients_are_those_of_the_plain_loop(world_size):
    for micro_batches, name in beginning(world_size, ROWS):
        schedule = validate(SCHEDULES[name](world_size, micro_batches))
        reference = layers(2 + 2 * len(schedule.placement))
        piece = cut(copy.deepcopy(reference), schedule, rank())
        runner, links = build(schedule, piece)
        with noted(micro_batches, name):
            for seed in range(2):  # gradients add up over steps, too
                check_step(runner, piece, reference, schedule, seed)
                assert runner.peak_in_flight == in_flight(schedule.actions[rank()])
            assert links.counters.control_bytes <= 1023 * links.counters.messages


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", SCHEDULES)
def test_messages_may_be_late(name):
    schedule = SCHEDULES[name](2, 4)
    reference = layers(9)
    piece = cut(copy.deepcopy(reference), schedule, rank())
    runner, _ = build(schedule, piece)
    with late_collectives() as late:
        check_step(runner, piece, reference, schedule)
    assert {"isend", "irecv"} <= {launch.op for launch in late.log}


@pytest.mark.world_size(2)
def test_a_steady_step_sends_activations_gradients_and_blocks():
    schedule = one_f_one_b(2, 8)
    piece = Piece([[nn.Linear(WIDTH, WIDTH)]])
    runner, links = build(schedule, piece, loss=lambda output, label: output.sum())
    inputs = [torch.randn(3, WIDTH) for _ in range(8)]
    runner.step(inputs, inputs)
    before = copy.copy(links.counters)
    runner.step(inputs, inputs)
    assert links.counters.messages - before.messages == 8
    assert links.counters.tensor_bytes - before.tensor_bytes == 8 * 3 * WIDTH * 4
    assert links.counters.control_bytes - before.control_bytes == 8 * CONTROL_BYTES


@pytest.mark.world_size(2)
def test_buffers_come_back_during_a_long_step():
    schedule = one_f_one_b(2, 32)
    runner, links = build(schedule, Piece([[nn.Linear(WIDTH, WIDTH)]]), loss=lambda output, label: output.sum())
    most = []
    mine = [links[route] for route in routes(schedule) if route.source == rank()]
    runner._run = lambda carry, chunk: most.append(sum(link.unsettled for link in mine)) or carry * torch.ones(1)
    runner.step([torch.randn(3, WIDTH, requires_grad=True) for _ in range(32)], [None] * 32)
    assert max(most) <= 2


@pytest.mark.world_size(3)
@pytest.mark.parametrize("empty", [0, 1, 2])
def test_a_stage_without_layers_passes_the_carry_on(empty):
    schedule = one_f_one_b(3, 4)
    reference = layers(6)
    split = [[], reference[:3], reference[3:]] if empty == 0 else [reference[:3], reference[3:]]
    split.insert(empty, []) if empty else None
    mine = copy.deepcopy(split[rank()])
    runner, _ = build(schedule, Piece([mine]))
    inputs, labels = batches(4)
    outcome = runner.step(inputs, labels)
    expected = plain(reference, inputs, labels)
    if rank() == 2:
        assert [float(a) for a in outcome.losses] == [float(b) for b in expected]
    for a, b in zip(nn.ModuleList(mine).parameters(), nn.ModuleList(split[rank()]).parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.world_size(3)
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("frozen", [[0], [1], [2], [0, 1], [1, 2]])
def test_frozen_stages(frozen, name):
    schedule = SCHEDULES[name](3, 4)
    reference = layers(8)
    for stage in frozen:
        nn.ModuleList(cut(reference, schedule, stage).chunks[0]).requires_grad_(False)
    piece = cut(copy.deepcopy(reference), schedule, rank())
    runner, links = build(schedule, piece)
    inputs, labels = batches(4)
    runner.step(inputs, labels)
    plain(reference, inputs, labels)
    twin = cut(reference, schedule, rank())
    for a, b in zip(*(nn.ModuleList(p.chunks[0]).parameters() for p in (piece, twin)), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.equal(a.grad, b.grad)
    if frozen == [0] and rank() == 1:  # to stage 2 activations, to stage 0 nothing but blocks
        assert links.counters.messages == 8


@pytest.mark.world_size(2)
def test_a_loss_on_no_parameters_is_an_error_on_all_stages():
    runner, _ = build(
        one_f_one_b(2, 2), Piece([[nn.Linear(WIDTH, WIDTH).requires_grad_(False)]]), loss=lambda o, y: o.sum()
    )
    inputs = [torch.randn(3, WIDTH)] * 2
    with pytest.raises((UsageError, CommError), match="depends on no parameter that trains"):
        runner.step(inputs, inputs)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("loss", [lambda o, y: o, lambda o, y: 3.0])
def test_a_loss_that_is_no_scalar_tensor_is_an_error_on_all_stages(loss):
    runner, _ = build(gpipe(2, 2), Piece([[nn.Linear(WIDTH, WIDTH)]]), loss=loss)
    inputs = [torch.randn(3, WIDTH)] * 2
    with pytest.raises(SheerError, match="must be a scalar tensor"):
        runner.step(inputs, inputs)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("in_place", [False, True])
def test_what_arrives_may_be_overwritten(in_place):
    torch.manual_seed(0)
    reference = [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=in_place), nn.Linear(WIDTH, WIDTH)]
    mine = copy.deepcopy(reference[:1] if rank() == 0 else reference[1:])
    runner, _ = build(one_f_one_b(2, 3), Piece([mine]), loss=lambda o, y: (o - y).square().mean())
    inputs = [torch.randn(3, WIDTH) for _ in range(3)]
    runner.step(inputs, inputs)
    for x in inputs:
        (nn.Sequential(*reference)(x) - x).square().mean().backward()
    twin = reference[:1] if rank() == 0 else reference[1:]
    for a, b in zip(nn.ModuleList(mine).parameters(), nn.ModuleList(twin).parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.world_size(2, 3)
def test_evaluation_gives_losses_and_outputs_and_keeps_nothing(world_size):
    schedule = forward_only(world_size, 5)
    reference = layers(8)
    runner, _ = build(schedule, cut(reference, schedule, rank()))
    inputs, labels = batches(5)
    outcome = runner.step(inputs, labels, keep_outputs=True)
    assert runner.peak_in_flight == 0
    if rank() == world_size - 1:
        with torch.no_grad():
            expected = [nn.Sequential(*reference)(x) for x in inputs]
        assert all(torch.equal(a, b) for a, b in zip(outcome.outputs, expected, strict=True))
        assert [float(loss) for loss in outcome.losses] == [
            float(loss_fn(x, y)) for x, y in zip(expected, labels, strict=True)
        ]
        assert not any(loss.requires_grad for loss in outcome.losses)
    else:
        assert outcome == ((), ())
    without, _ = build(schedule, cut(reference, schedule, rank()), loss=None)
    assert len(without.step(inputs, keep_outputs=True).outputs) == (5 if rank() == world_size - 1 else 0)


@pytest.mark.world_size(2)
def test_the_engine_is_told_of_every_action():
    from contextlib import contextmanager

    seen = []

    @contextmanager
    def around(action):
        seen.append(action)
        yield

    schedule = halved(one_f_one_b(2, 3))
    piece = cut(layers(6), schedule, rank())
    runner, _ = build(schedule, piece, around=around, scale=lambda loss: loss * 8)
    outcome = runner.step(*batches(3))
    assert seen == [one for one in schedule.actions[rank()] if one.kind in (F, B, Kind.INPUT, Kind.WEIGHT)]
    scaled = [p.grad / 8 for layer in piece.chunks[0] for p in layer.parameters()]
    reference = layers(6)
    expected = plain(reference, *batches(3))
    twin = [p.grad for layer in cut(reference, schedule, rank()).chunks[0] for p in layer.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(scaled, twin, strict=True))
    assert rank() == 0 or [float(a) for a in outcome.losses] == [float(b) for b in expected]


class Boom(Exception):
    pass


@pytest.mark.world_size(3, timeout=30)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "v", "forward only"])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_stage_that_raises_stops_the_others_and_the_next_step_is_right(name, failing):
    schedule = {**SCHEDULES, "forward only": forward_only}[name](3, 4)
    reference = layers(8)
    piece = cut(copy.deepcopy(reference), schedule, rank())
    calls = []

    def run(carry, *, chunk):
        calls.append(1)
        if len(calls) == at and rank() == failing:
            raise Boom("out of luck")
        return piece.run(carry, chunk=chunk)

    runner, _ = build(schedule, piece, run=run)
    for at in (1, 3, 4):
        calls.clear()
        if rank() == failing:
            with pytest.raises(Boom, match="out of luck"):
                runner.step(*batches(4))
        else:
            with pytest.raises(CommError) as error:
                runner.step(*batches(4))
            said = str(error.value)
            assert f"rank {failing}, stage {failing}, at F{at - 1}" in said
            assert "Boom: out of luck" in said
            assert 'raise Boom("out of luck")' in said
    at = 0
    nn.ModuleList(layer for chunk in piece.chunks for layer in chunk).zero_grad()
    if name != "forward only":
        check_step(runner, piece, reference, schedule)


@pytest.mark.world_size(2, timeout=30)
def test_what_cannot_travel_and_missing_inputs_stop_every_stage():
    runner, _ = build(one_f_one_b(2, 2), Piece([[lambda x: {"bad": {1, 2}}]]), loss=lambda o, y: o)
    with pytest.raises((DataError, CommError), match=r"the output of virtual stage 0\['bad'\] is a builtins.set"):
        runner.step([1, 2], [1, 2])
    with pytest.raises((UsageError, CommError), match="stage 0 needs inputs for 2 micro-batches, not 1"):
        runner.step([1], [1, 2])


@pytest.mark.world_size(2, timeout=30)
def test_a_backward_that_raises_stops_every_stage():
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, g):
            raise Boom("in backward")

    layer = nn.Linear(WIDTH, WIDTH)
    run = [layer, Bad.apply] if rank() == 0 else [layer]
    runner, _ = build(one_f_one_b(2, 4), Piece([run]), loss=lambda o, y: o.sum())
    with pytest.raises((Boom, CommError), match="in backward") as error:
        runner.step([torch.randn(2, WIDTH)] * 4, [None] * 4)
    assert rank() == 0 or "rank 0, stage 0, at B0" in str(error.value)


@pytest.mark.world_size(2)
def test_a_schedule_of_another_order_on_the_peer_is_named():
    there = one_f_one_b(2, 2)
    swap = {0: 1, 1: 0, -1: -1}
    other = tuple(tuple(a._replace(micro_batch=swap[a.micro_batch]) for a in acts) for acts in there.actions)
    schedule = there if rank() == 0 else Schedule("swapped", *_numbers(there), there.placement, other)
    runner, _ = build(schedule, cut(layers(6), schedule, rank()))
    if rank() == 0:
        with pytest.raises(CommError):
            runner.step(*batches(2))
        return
    with pytest.raises(CommError, match="micro-batch 0 for virtual stage 1 arrived where micro-batch 1"):
        runner.step(*batches(2))
    with pytest.raises(CommError, match="cannot go on"):
        runner.step(*batches(2))
    with nullcontext():
        comm.destroy_process_group()
