"""The flat update equals the per-parameter one, whatever is unused when, and its state moves by name."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sheer.errors import UsageError
from sheer.layout import STAGES, Bucket, Interval, ParamSpec, plan
from sheer.optim.flat import FlatOptimizer, needs_whole_tensors
from sheer.optim.lion import Lion
from sheer.optim.pieces import Master, SavedState

SHAPES = {"a": (3, 5), "b": (130,), "c": (), "d": (2, 2), "empty": (0, 4), "e": (7,)}
GROUPS = {"a": 0, "b": 0, "c": 1, "d": 0, "empty": 0, "e": 1}
MAKERS: dict[str, Callable[[list], torch.optim.Optimizer]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.1, foreach=True),
    "Adam fused": lambda groups: torch.optim.Adam(groups, lr=0.1, fused=True),
    "SGD momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=0.1),
    "Lion": lambda groups: Lion(groups, lr=0.1),
}
usage = st.lists(st.sets(st.sampled_from(sorted(SHAPES))), min_size=1, max_size=6)


class Sharded:
    """`world` flat optimizers in one process, each with its shard of the same buckets."""

    def __init__(
        self, make: Callable[[list], torch.optim.Optimizer], values: dict[str, torch.Tensor], world: int
    ) -> None:
        specs = [ParamSpec(n, s, torch.float32, torch.float32, GROUPS[n]) for n, s in SHAPES.items()]
        self.layout = plan(specs, stage=STAGES[1], world=world, limit=400)
        self.flats = [self._fill(bucket, values) for bucket in self.layout.buckets]
        self.ranks = []
        for rank in range(world):
            masters = [
                Master(b, b.shard(rank), _cut(f, b.shard(rank)))
                for b, f in zip(self.layout.buckets, self.flats, strict=True)
            ]
            base = make(_groups({name: torch.nn.Parameter(torch.zeros(1)) for name in SHAPES}))
            self.ranks.append(FlatOptimizer(base, masters))

    @staticmethod
    def _fill(bucket: Bucket, values: dict[str, torch.Tensor]) -> torch.Tensor:
        flat = torch.zeros(bucket.numel)
        for slot in bucket.slots:
            flat[slot.start : slot.stop] = values[slot.fqn].reshape(-1)
        return flat

    def step(self, grads: dict[str, torch.Tensor]) -> None:
        zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        unused = frozenset(SHAPES) - grads.keys()
        flat_grads = [self._fill(bucket, {**zeros, **grads}) for bucket in self.layout.buckets]
        for rank, optimizer in enumerate(self.ranks):
            own = [_cut(f, b.shard(rank)).clone() for b, f in zip(self.layout.buckets, flat_grads, strict=True)]
            optimizer.update(own, unused=unused)

    def values(self) -> dict[str, torch.Tensor]:
        return {
            slot.fqn: flat[slot.start : slot.stop].view(slot.shape)
            for bucket, flat in zip(self.layout.buckets, self.flats, strict=True)
            for slot in bucket.slots
        }


def _cut(flat: torch.Tensor, span: Interval) -> torch.Tensor:
    return flat[span.start : span.stop]


def _groups(params: dict[str, torch.Tensor]) -> list[dict]:
    return [
        {"params": [params[n] for n in SHAPES if GROUPS[n] == 0]},
        {"params": [params[n] for n in SHAPES if GROUPS[n] == 1], "lr": 0.03},
    ]


def _values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _grads(step: int, used: set[str]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    every = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: every[name] for name in used}


def _plain_step(params: dict[str, torch.Tensor], base: torch.optim.Optimizer, grads: dict[str, torch.Tensor]) -> None:
    for name, param in params.items():
        param.grad = grads[name].clone() if name in grads else None
    base.step()


@pytest.mark.parametrize("maker", MAKERS)
@settings(max_examples=15, deadline=None)
@given(steps=usage, world=st.integers(1, 3))
def test_equals_the_plain_optimizer(maker: str, steps: list[set[str]], world: int) -> None:
    params = {name: torch.nn.Parameter(value) for name, value in _values().items()}
    base = MAKERS[maker](_groups(params))
    sharded = Sharded(MAKERS[maker], _values(), world)
    for number, used in enumerate(steps):
        _plain_step(params, base, _grads(number, used))
        sharded.step(_grads(number, used))
    for name, value in sharded.values().items():
        torch.testing.assert_close(
            value, params[name].detach(), rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("maker", MAKERS)
@settings(max_examples=10, deadline=None)
@given(steps=usage, world=st.integers(1, 3), other=st.integers(1, 3))
def test_state_goes_by_name_to_any_other_sharding(maker: str, steps: list[set[str]], world: int, other: int) -> None:
    before = Sharded(MAKERS[maker], _values(), world)
    for number, used in enumerate(steps):
        before.step(_grads(number, used))
    after = Sharded(MAKERS[maker], {n: v.clone() for n, v in before.values().items()}, other)
    _move(before, after)
    for number in range(100, 102):
        for sharded in (before, after):
            sharded.step(_grads(number, set(SHAPES)))
    for name, value in before.values().items():
        torch.testing.assert_close(after.values()[name], value, rtol=1e-6, atol=1e-7)


def _move(before: Sharded, after: Sharded) -> None:
    """What a checkpoint does: pieces by name out of one, into the other."""
    whole: dict[tuple[str, str], torch.Tensor] = {}
    saved: dict[str, dict[str, SavedState]] = {}
    forms: dict[str, str] = {}
    for optimizer in before.ranks:
        forms |= optimizer.forms()
        for piece in optimizer.export():
            key = (piece.fqn, piece.key)
            saved.setdefault(piece.fqn, {})[piece.key] = SavedState(piece.shape, piece.data.dtype)
            flat = whole.setdefault(key, torch.zeros(torch.Size(piece.shape).numel(), dtype=piece.data.dtype))
            flat[piece.start : piece.start + piece.data.numel()] = piece.data
    for rank, optimizer in enumerate(after.ranks):
        incoming = optimizer.blank(saved, forms, rank=rank, world=len(after.ranks))
        for piece in incoming.pieces:
            piece.data.copy_(whole[piece.fqn, piece.key][piece.start : piece.start + piece.data.numel()])
        optimizer.adopt(incoming)


def test_a_bucket_is_one_tensor_until_histories_part() -> None:
    sharded = Sharded(MAKERS["AdamW"], _values(), 1)
    optimizer = sharded.ranks[0]
    buckets = len(sharded.layout.buckets)
    sharded.step(_grads(0, set(SHAPES)))
    assert len(optimizer.runs) == buckets
    sharded.step(_grads(1, set(SHAPES) - {"b"}))
    parted = len(optimizer.runs)
    assert parted > buckets
    sharded.step(_grads(2, set(SHAPES) - {"b"}))
    assert len(optimizer.runs) == parted
    assert sum(run.span.numel for run in optimizer.runs) == sum(bucket.numel for bucket in sharded.layout.buckets)


def test_groups_stay_the_same_objects_and_get_their_parameters_back() -> None:
    params = {name: torch.nn.Parameter(value) for name, value in _values().items()}
    base = MAKERS["AdamW"]([*_groups(params), {"params": []}])
    groups, given = list(base.param_groups), [list(group["params"]) for group in base.param_groups]
    specs = [ParamSpec(n, s, torch.float32, torch.float32, GROUPS[n]) for n, s in SHAPES.items()]
    layout = plan(specs, stage=STAGES[0], world=1, limit=10**6)
    masters = [Master(b, Interval(0, b.numel), torch.zeros(b.numel)) for b in layout.buckets]
    optimizer = FlatOptimizer(base, masters)
    assert [len(group["params"]) for group in base.param_groups] == [1, 1, 0]
    optimizer.release()
    assert all(now is before for now, before in zip(base.param_groups, groups, strict=True))
    assert all(
        p is q for group, own in zip(groups, given, strict=True) for p, q in zip(group["params"], own, strict=True)
    )


class NormScaled(torch.optim.Optimizer):
    """LAMB-like: the step is scaled by the whole tensor's norm."""

    def __init__(self, params, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * p.norm(), alpha=group["lr"])


class Fragile(torch.optim.Optimizer):
    """Cannot be tried on other tensors."""

    def __init__(self, params) -> None:
        super().__init__(params, {})
        self._own = self.param_groups[0]["params"][0]

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                assert p is self._own


def _over(make: Callable[[list], torch.optim.Optimizer]) -> torch.optim.Optimizer:
    return make([torch.nn.Parameter(torch.ones(4, 4))])


@pytest.mark.parametrize("maker", MAKERS)
def test_elementwise_optimizers_are_known(maker: str) -> None:
    assert not needs_whole_tensors(_over(MAKERS[maker]))


@pytest.mark.parametrize("make", [NormScaled, torch.optim.Adafactor, torch.optim.Muon, Fragile])
def test_others_are_found_by_trying(make: Callable[[list], torch.optim.Optimizer]) -> None:
    base = _over(make)
    state = copy.deepcopy(base.state_dict())
    assert needs_whole_tensors(base)
    assert base.state_dict() == state


def test_whole_tensors_cannot_be_sharded() -> None:
    with pytest.raises(UsageError, match=r"NormScaled .* Allowed: zero_optimization.stage 0"):
        Sharded(NormScaled, _values(), 2)


def test_state_that_cannot_be_saved_is_named() -> None:
    class Odd(Lion):
        def step(self, closure=None):
            super().step()
            for state in self.state.values():
                state["note"] = "text"

    sharded = Sharded(lambda groups: Odd(groups, lr=0.1), _values(), 1)
    sharded.step(_grads(0, set(SHAPES)))
    with pytest.raises(UsageError, match="optimizer state 'note' of Odd is a str"):
        sharded.ranks[0].forms()


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("factor", [1.0, 0.25, 0.3])
def test_a_factor_scales_the_gradients(maker: str, factor: float) -> None:
    """Inside the fused kernel or before the step: it is the same, and the optimizer keeps no trace of it."""
    scaled, plain = (Sharded(MAKERS[maker], _values(), 2) for _ in range(2))
    for step in range(3):
        grads = _grads(step, set(SHAPES))
        flat = [Sharded._fill(bucket, grads) for bucket in scaled.layout.buckets]
        for rank, optimizer in enumerate(scaled.ranks):
            own = [_cut(f, b.shard(rank)).clone() for b, f in zip(scaled.layout.buckets, flat, strict=True)]
            optimizer.update(own, factor=torch.tensor(factor))
            assert "grad_scale" not in vars(optimizer.base)
        plain.step({name: grad * factor for name, grad in grads.items()})
    for name, value in scaled.values().items():
        torch.testing.assert_close(value, plain.values()[name], rtol=1e-6, atol=1e-7)
