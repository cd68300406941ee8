"""What is particular to stage 3: what is whole when, in which order it comes, and what is not here reads as NaN."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import sheer
import sheer.testing
from sheer.errors import ConfigError, UsageError
from sheer.zero import units
from tests.engine.models import Block, batches, odd
from tests.engine.oracle import Case, adamw, assert_same_model, engine_run, plain_run, start, values

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
BLOCK = re.compile(r"blocks\.[0-9]")


def here(**fields: Any) -> Case:
    return Case(stage=3, world=sheer.testing.world_size(), rank=sheer.testing.rank(), **fields)


class Deep(nn.Module):
    """Blocks called as `run` says, between an embedding and a head."""

    def __init__(self, run: Callable[[nn.ModuleList, torch.Tensor], torch.Tensor], *, blocks: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(31, 12)
        self.blocks = nn.ModuleList([Block(12) for _ in range(blocks)])
        self.head = nn.Linear(12, 31)
        self.run = run

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.run(self.blocks, self.embed(tokens))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def in_order(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x)
    return x


def backwards(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for block in reversed(blocks):
        x = block(x)
    return x


def repeated(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for index in (0, 1, 1, 2, 0, 3, 4, 5, 2):
        x = blocks[index](x)
    return x


def skipping(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    """Every rank leaves out others."""
    for index, block in enumerate(blocks):
        if index % 3 != sheer.testing.rank():
            x = block(x)
    return x


def branches(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    left, right = blocks[0](x), blocks[1](x)
    return blocks[3](blocks[2](left + right)) + blocks[5](blocks[4](right))


def early_end(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for block in blocks[: 2 + 3 * sheer.testing.rank()]:
        x = block(x)
    return x


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("run", [backwards, repeated, branches], ids=lambda run: run.__name__)
def test_blocks_may_be_called_in_any_order(run: Any) -> None:
    case = here(accumulation=2, clip=0.5)
    model, reference = Deep(run), Deep(run)
    data = batches(3, size=case.global_batch)
    ours = engine_run(start(model, case), case, data)
    expected = plain_run(reference, case, data, optimizer=adamw(reference))
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(expected), **TOLERANCE)
    assert_same_model(model, reference, **TOLERANCE)


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("run", [skipping, early_end], ids=lambda run: run.__name__)
def test_ranks_may_skip_blocks(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = here(accumulation=2, clip=0.5)
    model, reference = Deep(run), Deep(run)
    data = batches(3, size=case.global_batch)
    ours = engine_run(start(model, case), case, data)

    def as_rank(module: nn.Module, tokens: torch.Tensor, rank: int, number: int) -> torch.Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(sheer.testing, "rank", lambda: rank)
            return module(tokens)

    expected = plain_run(reference, case, data, optimizer=adamw(reference), call=as_rank)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(expected), **TOLERANCE)
    assert_same_model(model, reference, **TOLERANCE)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("run", [in_order, repeated], ids=lambda run: run.__name__)
def test_few_parameters_are_whole_at_a_time(run: Any) -> None:
    """Two blocks, and what is in none."""
    model = Deep(run, blocks=8)
    engine = start(model, here(extra={"zero_optimization": {"stage": 3}}))
    size: dict[str, int] = {}
    for bucket in engine.layout.buckets:
        size[bucket.key.unit] = size.get(bucket.key.unit, 0) + bucket.numel * 4
    outside = size.pop("")
    vault = engine._runtime.gathering.vault
    for step in range(3):
        vault.peak = vault.live
        engine_run(engine, here(), batches(1, size=4, seed=step))
        assert vault.live == 0
        assert vault.peak <= outside + 2 * max(size.values())


class Wide(nn.Module):
    """No blocks of its own: large layers, one of them read by hand, and a few small ones."""

    def __init__(self, tie: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(350, 320)
        self.body = nn.Sequential(*(nn.Linear(320, 320) for _ in range(5)))
        self.norm = nn.LayerNorm(320)
        self.head = nn.Linear(320, 350, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.body(self.embed(tokens)))
        return nn.functional.cross_entropy(nn.functional.linear(x, self.head.weight).flatten(0, 1), tokens.flatten())


@pytest.mark.world_size(2)
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_large_layers_in_no_block_are_gathered_one_by_one(tie: bool, compiled: bool) -> None:
    """Those of the `Sequential`. Of a compiled model nothing can be gathered inside."""
    model, reference = Wide(tie), Wide(tie)
    extra = {"compile": {"enabled": compiled, "backend": "eager"}, "zero_optimization": {"stage": 3}}
    case = here(extra=extra)
    engine = start(model, case)
    data = batches(4, size=4)
    vault, peaks = engine._runtime.gathering.vault, []
    ours = []
    for batch in data:
        vault.peak = vault.live
        ours += engine_run(engine, case, [batch])
        peaks.append(vault.peak)
    assert engine._runtime.gathering.vault.live == 0
    expected = plain_run(reference, case, data, optimizer=adamw(reference))
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(expected), **TOLERANCE)
    assert_same_model(model, reference, **TOLERANCE)
    if compiled:
        assert max(peaks) >= 4 * sum(param.numel() for param in reference.parameters())
    else:
        outside, layer = (1 if tie else 2) * 350 * 320 + 2_000, 320 * 320 + 320
        assert max(peaks) <= 4 * (outside + 2 * layer)


class ByHand(nn.Module):
    """Large layers, called in ways that go past their gates; its parts may be called without it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(31, 16)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        self.way = way
        if way == "method compiled":
            self.body.compile(backend="eager")
        if way == "forward compiled":
            self.body.forward = torch.compile(self.body.forward, backend="eager")  # type: ignore[method-assign]
        self.head = nn.Linear(16, 31)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.body(self.embed(tokens))
        if self.way == "reentrant":
            x = torch.utils.checkpoint.checkpoint(lambda x: x @ self.body[2].weight.T, x, use_reentrant=True)
        return self.head(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.logits(tokens).flatten(0, 1), tokens.flatten())


@pytest.mark.world_size(2)
@pytest.mark.parametrize("way", ["reentrant", "method compiled", "forward compiled", "called without the model"])
def test_large_layers_are_whole_whoever_reads_them(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "LARGE", 100)
    case, model, reference = here(), ByHand(way), ByHand(way)
    engine = start(model, case)
    data = batches(3, size=case.global_batch)

    def call(module: Any, tokens: torch.Tensor, rank: int, number: int) -> torch.Tensor:
        inner = module if isinstance(module, ByHand) else module.module
        return inner.forward(tokens) if way == "called without the model" else module(tokens)

    if way == "called without the model":
        with torch.no_grad():
            torch.testing.assert_close(model.logits(data[0]), reference.logits(data[0]))
    ours = engine_run(engine, case, data, call=call)
    expected = plain_run(reference, case, data, optimizer=adamw(reference), call=call)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(expected), **TOLERANCE)
    assert_same_model(model, reference, **TOLERANCE)


class Apart(nn.Module):
    """A large layer that is defined last and called first, and one that is read past its call, on some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(31, 16)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        self.head = nn.Linear(16, 31)
        self.other = nn.Linear(16, 16)
        self.here = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = self.body(self.other(x) if self.here else x)
        x = x @ self.head.weight.T if self.here else self.head(x)
        return nn.functional.cross_entropy(x.flatten(0, 1), tokens.flatten())


@pytest.mark.world_size(2)
def test_ranks_may_differ_in_how_they_use_large_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "LARGE", 100)
    case, model, reference = here(), Apart(), Apart()
    engine = start(model, case)
    data = batches(3, size=case.global_batch)

    def call(module: Any, tokens: torch.Tensor, rank: int, number: int) -> torch.Tensor:
        (module if isinstance(module, Apart) else module.module).here = rank == 0
        return module(tokens)

    ours = engine_run(engine, case, data, call=call)
    expected = plain_run(reference, case, data, optimizer=adamw(reference), call=call)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(expected), **TOLERANCE)
    assert_same_model(model, reference, **TOLERANCE)


@pytest.mark.world_size(2)
def test_a_block_is_gathered_when_it_is_called_where_nothing_is_prefetched() -> None:
    model = Deep(in_order)
    engine = start(model, here(extra={"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 0}}))
    engine_run(engine, here(), batches(1, size=4))
    engine.traffic.log = log = []
    seen: list[set[str]] = []
    for block in model.blocks:
        block.register_forward_hook(lambda *_: seen.append({found for e in log for found in BLOCK.findall(e.what)}))
    engine_run(engine, here(), batches(1, size=4))
    assert seen == [{f"blocks.{number}" for number in range(count)} for count in range(1, 7)]


@pytest.mark.world_size(2)
def test_the_next_block_is_on_its_way_while_one_runs() -> None:
    model = Deep(in_order)
    engine = start(model, here(extra={"zero_optimization": {"stage": 3}}))
    engine_run(engine, here(), batches(1, size=4))
    engine.traffic.log = log = []
    seen: list[tuple[str, int]] = []
    for index, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, index=index: seen.append((f"forward {index}", len(log))))
        block.norm.weight.register_hook(lambda _, index=index: seen.append((f"backward {index}", len(log))))
    engine_run(engine, here(), batches(1, size=4))
    names = [f"{entry.op} {re.findall(r'blocks.[0-9]|$', entry.what)[0]}" for entry in log]
    ahead = {when: names[:count] for when, count in seen}
    assert "all_gather blocks.3" in ahead["forward 2"]
    assert "all_gather blocks.4" not in ahead["forward 2"]
    assert ahead["backward 3"].count("all_gather blocks.2") == 2
    assert ahead["backward 3"].count("all_gather blocks.1") == 1
    reductions = [entry for entry in log if entry.op == "reduce_scatter"]
    assert len(reductions) == 7


@pytest.mark.world_size(2)
def test_a_parameter_that_is_not_here_never_looks_like_one(tmp_path: Any) -> None:
    model = odd()
    start(model, here())
    weight = model.blocks[0].up.weight
    assert tuple(weight.shape) == (24, 12)
    assert weight.dtype is torch.float32
    assert weight.isnan().all()
    with pytest.raises(RuntimeError), torch.no_grad():
        weight.add_(1.0)
    with pytest.raises(RuntimeError):
        weight.detach().numpy()
    with pytest.raises(RuntimeError):
        torch.save(model.state_dict(), tmp_path / "weights.pt")


@pytest.mark.world_size(2)
def test_a_conversion_of_sharded_parameters_is_refused() -> None:
    case = here()
    model = odd()
    engine = start(model, case)
    model.double()
    with pytest.raises(UsageError, match=r"'.*' was converted or copied while it was sharded.*GatheredParameters"):
        engine_run(engine, case, batches(1, size=case.global_batch))


@pytest.mark.world_size(2)
def test_gathered_parameters_nest_and_the_modifier_wins() -> None:
    case = here()
    model = odd()
    engine = start(model, case)
    block = model.blocks[1]
    with sheer.zero.GatheredParameters(block, modifier_rank=1):
        with sheer.zero.GatheredParameters([block.up.weight]):
            assert not block.up.weight.isnan().any()
        assert not block.up.weight.isnan().any()
        assert model.blocks[0].up.weight.isnan().all()
        with torch.no_grad():
            block.up.weight.fill_(float(case.rank))
    assert block.up.weight.isnan().all()
    assert (values(model)["blocks.1.up.weight"] == 1.0).all()
    assert engine._runtime.gathering.vault.live == 0
    with pytest.raises(UsageError, match="modifier_rank=2 is none of 2 ranks"):
        sheer.zero.GatheredParameters(block, modifier_rank=2).__enter__()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_written_through_data_inside_gathered_parameters_counts(stage: int) -> None:
    """It leaves no trace in version counters."""
    model = odd()
    start(model, here()._replace(stage=stage))
    weight = model.blocks[1].up.weight
    with sheer.zero.GatheredParameters(weight):
        weight.data.fill_(2.0)
    assert (values(model)["blocks.1.up.weight"] == 2.0).all()


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_full_state_dict_is_the_plain_modules(stage: int) -> None:
    case = here()._replace(stage=stage)
    model, reference = odd(), odd()
    engine = start(model, case)
    data = batches(2, size=case.global_batch)
    engine_run(engine, case, data)
    plain_run(reference, case, data, optimizer=adamw(reference))
    reference.seen.copy_(model.seen)
    everywhere = engine.full_state_dict(rank0_only=False)
    state = engine.full_state_dict()
    if case.rank:
        assert state == {}
    for found in (everywhere, state) if case.rank == 0 else (everywhere,):
        assert list(found) == list(reference.state_dict())
        assert found["head.weight"] is found["embed.weight"]
        for key, value in reference.state_dict().items():
            torch.testing.assert_close(found[key], value, **TOLERANCE)
    before = state["gain"].clone() if state else None
    engine_run(engine, case, data)
    assert before is None or state["gain"] == before


@pytest.mark.world_size(2)
@pytest.mark.parametrize("how", ["module", "forward", "part"])
def test_evaluation_by_whatever_call(how: str) -> None:
    model, reference = Deep(in_order), Deep(in_order)
    engine = start(model, here())
    tokens = batches(1, size=2)[0]
    with torch.no_grad():
        if how == "part":
            ours, theirs = (m.head(m.blocks[0](m.embed(tokens))) for m in (model, reference))
        else:
            ours = (engine.module if how == "module" else model.forward)(tokens)
            theirs = reference(tokens)
    torch.testing.assert_close(ours, theirs)
    engine.empty_partition_cache()
    assert engine._runtime.gathering.vault.live == 0


@dataclass
class Result:
    value: torch.Tensor
    note: str = "not registered with pytree"


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(12)

    def forward(self, x: torch.Tensor) -> Any:
        return {"deep": [Result(self.block(x))]}


@pytest.mark.world_size(2)
def test_outputs_of_any_kind() -> None:
    def run(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            x = block(x)["deep"][0].value
        return x

    def build() -> nn.Module:
        model = Deep(run, blocks=0)
        model.blocks.extend(Wrapped() for _ in range(3))
        return model

    torch.manual_seed(0)
    model = build()
    torch.manual_seed(0)
    reference = build()
    reference.load_state_dict(model.state_dict())
    case = here()
    data = batches(3, size=case.global_batch)
    ours = engine_run(start(model, case), case, data)
    expected = plain_run(reference, case, data, optimizer=adamw(reference))
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(expected), **TOLERANCE)


@pytest.mark.world_size(2)
def test_named_blocks_inside_one_another() -> None:
    zero = {"zero_optimization": {"stage": 3, "blocks": ["Block", "blocks.*.up"]}}
    case = here(accumulation=2, extra=zero)
    model, reference = Deep(in_order), Deep(in_order)
    data = batches(3, size=case.global_batch)
    engine = start(model, case)
    units = {bucket.key.unit for bucket in engine.layout.buckets}
    assert {"", "blocks.0", "blocks.0.up", "blocks.5.up"} <= units
    ours = engine_run(engine, case, data)
    expected = plain_run(reference, case, data, optimizer=adamw(reference))
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(expected), **TOLERANCE)
    assert_same_model(model, reference, **TOLERANCE)


@pytest.mark.world_size(2)
def test_blocks_that_cannot_be(world_size: int) -> None:
    with pytest.raises(ConfigError, match=r"zero_optimization\.blocks: 'Blok' matches no class name"):
        start(odd(), here(extra={"zero_optimization": {"stage": 3, "blocks": ["Blok"]}}))
    extra = {"zero_optimization": {"stage": 3, "blocks": ["blocks.*.up"]}}
    extra["compile"] = {"enabled": True, "backend": "eager"}
    with pytest.raises(ConfigError, match=r"'blocks\.0\.up', which lies inside the compile target 'blocks\.0'"):
        start(odd(), here(extra=extra))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("scope", ["auto", "module", ["Block"]], ids=str)
def test_compiled_by_any_scope(scope: Any) -> None:
    compiled = {"compile": {"enabled": True, "backend": "eager", "scope": scope}}
    case = here(accumulation=2, extra=compiled)
    model, reference = Deep(in_order), Deep(in_order)
    data = batches(3, size=case.global_batch)
    engine = start(model, case)
    ours = engine_run(engine, case, data[:2])
    graphs = engine.compile_report.graphs
    ours += engine_run(engine, case, data[2:])
    assert engine.compile_report.graphs == graphs > 0
    assert not engine.compile_report.recompiles
    expected = plain_run(reference, case, data, optimizer=adamw(reference))
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(expected), **TOLERANCE)
    assert_same_model(model, reference, **TOLERANCE)


@pytest.mark.world_size(2)
def test_after_an_exception_in_a_forward_the_next_step_is_right() -> None:
    case = here()
    model, reference = Deep(in_order), Deep(in_order)
    data = batches(3, size=case.global_batch)
    engine = start(model, case)
    ours = engine_run(engine, case, data[:1])
    handle = model.blocks[2].register_forward_pre_hook(lambda *_: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            engine(data[0][:2])
    handle.remove()
    ours += engine_run(engine, case, data[1:])
    expected = plain_run(reference, case, data, optimizer=adamw(reference))
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(expected), **TOLERANCE)
    assert engine._runtime.gathering.vault.live == 0


class Adapted(nn.Module):
    """A linear layer that is frozen, and a low-rank change of it that trains."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted() -> Deep:
    model = Deep(in_order, blocks=3).requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    return model


@pytest.mark.world_size(2)
@pytest.mark.parametrize("extra", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_adapters_train_beside_what_is_frozen_and_is_unfrozen_later(extra: dict[str, Any]) -> None:
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}
    case = here(accumulation=2, clip=0.5, extra=sgd | extra)
    model, reference = adapted(), adapted()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    data = batches(4, size=case.global_batch)
    engine = start(model, case)
    ours = engine_run(engine, case, data[:2])
    expected = plain_run(reference, case, data[:2], optimizer=optimizer)
    engine.traffic.log, buckets = [], len(engine.layout.buckets)
    log = engine.traffic.log
    for module in (model, reference):
        module.blocks.requires_grad_(True)
    with torch.enable_grad():
        engine._before_forward()
    gathers = [entry.what for entry in log if entry.op == "all_gather"]
    assert len(gathers) == len(set(gathers)) == buckets  # each once, not one message for each parameter
    ours += engine_run(engine, case, data[2:])
    expected += plain_run(reference, case, data[2:], optimizer=optimizer)
    close = TOLERANCE if not extra else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(expected), **close)
    if not extra:
        assert_same_model(model, reference, **TOLERANCE)
