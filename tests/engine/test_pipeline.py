"""An engine over several stages is the plain loop over the whole model: losses, norms, weights, skips."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sheer
import sheer.testing
from sheer import LayerSpec, TiedLayerSpec
from sheer.errors import CommError, ConfigError, DataError, UsageError
from sheer.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
)
from tests.engine.models import batches
from tests.engine.oracle import Case
from tests.engine.stages import (
    CLOSE,
    WIDTH,
    assert_trains_as_plain,
    case_of,
    cross_entropy,
    layers,
    oracle,
    staged,
    train,
    whole,
)
from tests.engine.test_identity import face
from tests.pairs import beginning, noted, pairs
from tests.pipeline.models import Language


def start(case: Case, stages: int, *, module: nn.Module | None = None, **more: Any) -> Any:
    return sheer.initialize(model=staged(stages) if module is None else module, config=case.config(**more))[0]


def assert_same_parameters(engine: Any, expected: nn.Module) -> None:
    theirs = dict(expected.named_parameters())
    with sheer.zero.GatheredParameters(engine.module):
        for name, value in engine.module.named_parameters():
            torch.testing.assert_close(value, theirs[engine.module.canonical.get(name, name)], **CLOSE)


SPLITS = pairs((2, 3, 4), (1, 2, 3, 4), (0, 1, 2, 3), (1, 3), allowed=lambda world, stages, *_: world % stages == 0)


@pytest.mark.world_size(2, 3, 4)
def test_stages_train_as_the_plain_loop(world_size: int) -> None:
    """With a parameter shared by the first and the last stage, an unused one, and clipping by the norm of all."""
    for stages, zero, accumulation in beginning(world_size, SPLITS):
        case = case_of(stages, stage=zero, accumulation=accumulation, clip=0.5)
        with noted(stages, zero, accumulation):
            engine = start(case, stages)
            assert_trains_as_plain(engine, case, steps=2)
            assert (engine.global_steps, engine.micro_steps) == (2, 2 * accumulation)
            assert engine.global_samples == 2 * case.global_batch
            engine.destroy()


SCHEDULES = {
    "gpipe": {},
    "interleaved": {"chunks": 2},
    "zero-bubble": {},
    "zb-v": {"chunks": 2, "placement": "v"},
}
STEPS = pairs((2, 4), tuple(SCHEDULES), (0, 2, 3))


@pytest.mark.world_size(2, 4)
def test_every_schedule_gives_the_same_step(world_size: int) -> None:
    for schedule, zero in beginning(world_size, STEPS):
        case = case_of(2, stage=zero, accumulation=4)
        with noted(schedule, zero):
            engine = start(case, 2, module=staged(2, **SCHEDULES[schedule]), pipeline={"schedule": schedule})
            assert_trains_as_plain(engine, case)
            engine.destroy()


@pytest.mark.world_size(3)
def test_three_stages_share_one_parameter() -> None:
    """Twice on the middle one; the sum over all its places is its gradient, its norm counts once."""
    shared = [TiedLayerSpec("w", nn.Linear, WIDTH, WIDTH) for _ in range(4)]
    model = [layers()[0], shared[0], shared[1], shared[2], shared[3], *layers()[1:]]
    case = case_of(3, stage=1, accumulation=2, clip=0.1)
    engine = start(case, 3, module=staged(3, layers=model, boundaries=[0, 2, 4, len(model)]))
    assert_trains_as_plain(engine, case, module=whole(layers=model))


@pytest.mark.world_size(4)
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_bf16_masters_of_a_shared_parameter_stay_equal(zero: int) -> None:
    case = case_of(2, stage=zero, accumulation=2, extra={"bf16": {"enabled": True}})
    engine = start(case, 2)
    train(engine, case, batches(3, size=case.global_batch))
    mine = [p for p in engine.module.parameters() if p.shape == (31, WIDTH)]
    masters = engine.mesh.pipe.gather_objects(safe_get_full_fp32_param(mine[0]))
    assert torch.equal(masters[0], masters[1])
    assert mine[0].dtype is torch.bfloat16


@pytest.mark.world_size(2)
def test_all_stages_skip_a_step_that_overflows_on_one() -> None:
    """fp16: the scale falls on every rank, no stage moves, and the next step is right."""
    case = case_of(2, extra={"fp16": {"enabled": True, "initial_scale_power": 40, "hysteresis": 1}})
    engine = start(case, 2)
    before = {name: value.clone() for name, value in engine.module.state_dict().items() if not name.endswith("seen")}
    train(engine, case, batches(1, size=case.global_batch))
    assert engine.last_step.skipped
    assert engine.mesh.world.gather_objects(engine.loss_scale()) == [2.0**39] * 2
    assert all(torch.equal(engine.module.state_dict()[name], value) for name, value in before.items())
    while engine.last_step.skipped:
        train(engine, case, batches(1, size=case.global_batch))
    assert len(set(engine.mesh.world.gather_objects(engine.last_step.grad_norm))) == 1


@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    ("scope", "zero", "backend"), [("auto", 1, "eager"), ("auto", 3, "aot_eager"), ("module", 3, "eager")]
)
def test_compiled_stages_train_the_same(scope: str, zero: int, backend: str) -> None:
    case = case_of(2, stage=zero, accumulation=2)
    engine = start(case, 2, compile={"enabled": True, "backend": backend, "scope": scope})
    assert isinstance(engine.module, sheer.PipelineModule)
    assert_trains_as_plain(engine, case)
    assert isinstance(engine.module, sheer.PipelineModule)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("zero", [0, 3])
def test_recomputed_layers_train_the_same(zero: int) -> None:
    """(A recomputed layer counts what it sees twice, as under torch's checkpoint.)"""
    case = case_of(2, stage=zero, accumulation=2)
    engine, data = start(case, 2, pipeline={"activation_checkpoint_interval": 2}), batches(2, size=case.global_batch)
    mine = train(engine, case, data)
    expected, plain = oracle(case, data)
    torch.testing.assert_close(torch.tensor(mine), torch.tensor(plain), **CLOSE)
    assert_same_parameters(engine, expected)


# --- freezing -------------------------------------------------------------------------------------------------------


@pytest.mark.world_size(4)
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_a_frozen_stage_passes_gradients_on(zero: int) -> None:
    """A whole stage frozen and unfrozen between steps: the others go on; all ranks plan anew together."""
    case, data = case_of(2, stage=zero), batches(4, size=8)
    engine = start(case, 2, module=staged(2, boundaries=[0, 5, 8]))
    expected = whole()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for step, batch in enumerate(data):
        for module in (engine.module, expected):
            for name, param in module.named_parameters():
                if name[0] in "1234":
                    param.requires_grad_(step % 2 == 0)
        batch = batch[: case.global_batch]
        train(engine, case, [batch])
        cross_entropy(expected(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.module.requires_grad_(True)
    assert_same_parameters(engine, expected)


@pytest.mark.world_size(2)
def test_a_shared_parameter_is_frozen_on_all_its_stages_or_none() -> None:
    case = case_of(2)
    engine = start(case, 2)
    if engine.is_first_stage():
        engine.module.get_parameter("0.weight").requires_grad_(False)
    with pytest.raises(UsageError, match=r"'0.weight' is shared by stages .0, 1."):
        train(engine, case, batches(1, size=case.global_batch))
    engine.module.get_parameter("0.weight" if engine.is_first_stage() else "7.weight").requires_grad_(False)
    train(engine, case, batches(1, size=case.global_batch))
    assert engine.global_steps == 1


@pytest.mark.world_size(3)
def test_a_stage_without_layers_and_one_without_parameters() -> None:
    model = [layers()[0], *layers()[1:], nn.Identity()]
    case = case_of(3, stage=1)
    engine = start(case, 3, module=staged(3, layers=model, boundaries=[0, 8, 8, 9], loss_fn=cross_entropy))
    assert_trains_as_plain(engine, case, module=whole(layers=model))


# --- data -------------------------------------------------------------------------------------------------------------


@pytest.mark.world_size(2, 4)
def test_unequal_data_ends_on_all_ranks_and_its_rest_is_trained_by_flush() -> None:
    """One rank has two micro-batches more than another; what all have is a step of its own."""
    case = case_of(2, accumulation=3)
    engine = start(case, 2)
    (batch,) = batches(1, size=case.global_batch)
    mine = [(parts[case.rank], parts[case.rank]) for parts in case.micro_batches(batch)]
    more = [*mine, *mine[: 2 if sheer.testing.rank() == 0 else 1]]
    feed = iter(more)
    engine.train_batch(feed)
    with pytest.raises(StopIteration, match=r"1 of 3 micro-batches of a step taken; engine.flush\(\) trains on them"):
        engine.train_batch(feed)
    result = engine.flush()
    assert result.micro_batches == 1
    assert engine.flush() is None
    with pytest.raises(StopIteration, match="0 of 3"):
        engine.train_batch(iter([]))
    expected = whole()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for part in (batch, batch[: 2 * case.world]):
        cross_entropy(expected(part), part).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_parameters(engine, expected)


@pytest.mark.world_size(3)
def test_only_the_ends_need_data_and_lengths_may_vary() -> None:
    case = case_of(3, accumulation=2)
    engine, expected = start(case, 3), whole()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for lengths in ((5, 3), (2, 7)):
        parts = [batches(1, size=2, length=n)[0] for n in lengths]
        middle = engine.mesh.stage == 1
        engine.train_batch(None if middle else iter([(part, part) for part in parts]))
        for part in parts:
            (cross_entropy(expected(part), part) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_parameters(engine, expected)


@pytest.mark.world_size(2)
def test_what_is_wrong_with_data_is_said_on_all_ranks() -> None:
    case = case_of(2)
    engine = start(case, 2)
    with pytest.raises(DataError, match=r"rank 0: .*needs training_data"):
        engine.train_batch()
    with pytest.raises(DataError, match=r"rank 0: .*pair \(inputs, label\)"):
        engine.train_batch(iter([torch.zeros(2)]))
    engine.set_batch_fn(lambda batch: (batch, batch))
    engine.train_batch(iter(batches(1, size=2)))
    engine.set_dataiterator(iter(batches(1, size=2)))
    engine.train_batch()
    assert engine.global_steps == 2


@pytest.mark.world_size(1, 2, 4)
@pytest.mark.parametrize("zero", [0, 3])
def test_evaluation_gives_loss_and_logits_on_every_rank(world_size: int, zero: int) -> None:
    stages = min(world_size, 2)
    case = case_of(stages, stage=zero, accumulation=2)
    engine = start(case, stages, bf16={"enabled": False})
    (batch,) = batches(1, size=case.global_batch)
    mine = [(parts[case.rank], parts[case.rank]) for parts in case.micro_batches(batch)]
    expected = whole().eval()
    with torch.no_grad():
        output = expected(batch)
    loss, logits = engine.eval_batch(iter(mine), return_logits=True)
    torch.testing.assert_close(loss, cross_entropy(output, batch), **CLOSE)
    mine_of_output = torch.cat([parts[case.rank] for parts in case.micro_batches(output)])
    torch.testing.assert_close(logits, mine_of_output, **CLOSE)
    each = engine.eval_batch(iter(mine), reduce_output=None)
    assert each.shape == (2,)
    torch.testing.assert_close(each.mean(), loss)
    other = [(x[:, :3], None) for x, _ in mine]
    assert engine.eval_batch(iter(other), compute_loss=False, num_micro_batches=1).shape == (2, 3, 31)
    ragged = [(mine[0][0], None), (mine[1][0][:, :2], None)]
    assert [tuple(one.shape) for one in engine.eval_batch(iter(ragged), compute_loss=False)] == [(2, 5, 31), (2, 2, 31)]
    assert engine.module.training
    with pytest.raises(StopIteration):
        engine.eval_batch(iter([]))


# --- errors ---------------------------------------------------------------------------------------------------------


class Trips(nn.Module):
    """Raises on one stage at one call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.left = 10**9

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            raise ValueError("the stage has tripped")
        return self.linear(x)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_a_stage_that_raises_stops_all_and_the_next_step_is_right(zero: int) -> None:
    """Also the other data ranks, which reduce with it while it has failed. At the first micro-batch and at the last."""
    model = [*layers()[:3], LayerSpec(Trips), *layers()[3:]]
    case = case_of(2, stage=zero, accumulation=3)
    engine = start(case, 2, module=staged(2, layers=model, boundaries=[0, 4, len(model)]))
    error = ValueError if sheer.testing.rank() == 1 else CommError
    data, mine = batches(2, size=case.global_batch), []
    for step, at in enumerate((1, 3)):
        if sheer.testing.rank() == 1:
            next(m for m in engine.module.modules() if isinstance(m, Trips)).left = at
        with pytest.raises(error, match="the stage has tripped") as caught:
            train(engine, case, batches(1, size=case.global_batch, seed=9))
        if error is CommError:
            assert "rank 1, stage 0, at F" in str(caught.value)
            assert "Trips" in str(caught.value) or "in forward" in str(caught.value)
        assert engine.global_steps == step
        mine += train(engine, case, data[step : step + 1])
    _, plain = oracle(case, data, module=whole(layers=model))
    torch.testing.assert_close(torch.tensor(mine), torch.tensor(plain), **CLOSE)


@pytest.mark.world_size(2)
def test_micro_batches_of_stages_are_not_run_by_hand() -> None:
    case = case_of(2)
    engine = start(case, 2)
    for verb in (lambda: engine(torch.zeros(1, 2, dtype=torch.long)), lambda: engine.backward(None), engine.step):
        with pytest.raises(UsageError, match=r"with 2 pipeline stages use engine.train_batch"):
            verb()


@pytest.mark.world_size(2)
def test_configs_that_do_not_fit_the_module() -> None:
    case = case_of(2)
    with pytest.raises(ConfigError, match=r"pipeline.stages is 3, but the model has 2"):
        start(case, 2, pipeline={"stages": 3})
    with pytest.raises(ConfigError, match=r"pipeline.stages is 2, but the model has 1"):
        start(Case(world=2, rank=0), 1, module=nn.Linear(2, 2), pipeline={"stages": 2})
    with pytest.raises(UsageError, match="zb-v"):
        start(case, 2, pipeline={"schedule": "zb-v"})
    with pytest.raises(UsageError, match="neither a name"):
        start(case, 2, pipeline={"schedule": "nothing.txt"})
    start(case, 2, pipeline={"stages": "auto"}).destroy()


# --- one parameter's state --------------------------------------------------------------------------------------------


@pytest.mark.world_size(4)
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_the_state_of_a_stages_parameters_can_be_read_and_written(zero: int) -> None:
    case = case_of(2, stage=zero)
    engine = start(case, 2)
    train(engine, case, batches(1, size=case.global_batch))
    for name, param in engine.module.named_parameters():
        assert safe_get_full_grad(param) is None
        value = safe_get_full_fp32_param(param)
        assert torch.equal(value, whole_value(param))
        momentum = safe_get_full_optimizer_state(param, "momentum_buffer")
        assert name.endswith("never") if momentum is None else momentum.shape == param.shape
        safe_set_full_fp32_param(param, value + 1)
        assert torch.equal(whole_value(param), value + 1)


def whole_value(param: nn.Parameter) -> torch.Tensor:
    with sheer.zero.GatheredParameters(param):
        return param.detach().clone()


@pytest.mark.world_size(4)
def test_an_engine_says_where_it_stands() -> None:
    engine = start(case_of(2), 2)
    stage, column = divmod(sheer.testing.rank(), 2)
    assert (engine.get_pipeline_parallel_rank(), engine.get_data_parallel_rank()) == (stage, column)
    assert (engine.is_first_stage(), engine.is_last_stage()) == (stage == 0, stage == 1)
    assert (engine.world_size, engine.dp_world_size, engine.global_rank) == (4, 2, sheer.testing.rank())
    assert engine.train_batch_size() == 4
    grid = engine.grid
    assert engine.mpu.get_data_parallel_rank() == grid.get_data_parallel_id() == column
    assert (engine.stage_id, grid.get_stage_id(), grid.get_pipe_parallel_rank()) == (stage, stage, stage)
    assert (grid.is_first_stage, grid.is_last_stage, grid.stage_to_global(1)) == (stage == 0, stage == 1, 2 + column)
    sizes = grid.get_pipe_parallel_world_size(), grid.get_data_parallel_world_size()
    assert sizes == (2, 2) == (grid.topology().get_dim("pipe"), grid.topology().get_dim("data"))
    assert grid.get_pipe_parallel_group() is engine.mesh.pipe.group
    assert (engine.is_pipe_parallel, engine.is_data_parallel, engine.is_model_parallel) == (True, True, False)
    assert grid.get_model_parallel_world_size() == 1


@pytest.mark.world_size(2)
def test_losses_and_logits_under_other_names() -> None:
    case = case_of(2, accumulation=2)
    engine = start(case, 2)
    assert engine.total_loss is engine.agg_train_loss is None
    (batch,) = batches(1, size=case.global_batch)
    mine = [(part, part) for part in batch.split(case.micro)]
    loss = engine.train_batch(iter(mine))
    assert engine.agg_train_loss == loss
    torch.testing.assert_close(engine.total_loss, 2 * loss)
    assert (engine.micro_batches, engine.micro_batch_size) == (2, case.micro)
    with torch.inference_mode():
        logits = engine.inference_batch(iter([(part, None) for part in batch.split(case.micro)]))
        assert logits.shape == (*batch.shape, 31)
        with pytest.raises(UsageError, match=r"train_batch inside torch.inference_mode\(\)"):
            engine.train_batch(iter(mine))
    engine.train_batch(iter(mine))


def test_a_module_may_have_a_grid_of_its_own() -> None:
    model = nn.Linear(2, 2)
    model.grid = "mine"
    engine = start(Case(), 1, module=model)
    assert engine.grid == "mine"
    assert engine.mpu is None


@pytest.mark.world_size(2)
def test_an_engine_leaves_no_group_behind() -> None:
    groups = torch.distributed.distributed_c10d._world.pg_map  # noqa: TID251
    before = len(groups)
    engine = start(case_of(2), 2)
    assert len(groups) > before
    engine.destroy()
    assert len(groups) == before


# --- nothing wraps the module -----------------------------------------------------------------------------------------


PRECISIONS: list[dict[str, Any]] = [{}, {"bf16": {"enabled": True}}, {"torch_autocast": {"enabled": True}}]
STAYS = [
    # Compiled with each stage and with each precision once.
    (zero, precision, (row + column) % 3 == 0)
    for row, zero in enumerate((0, 2, 3))
    for column, precision in enumerate(PRECISIONS)
]


@pytest.mark.world_size(4)
@pytest.mark.parametrize(("zero", "precision", "compiled"), STAYS)
def test_a_stage_stays_the_module_it_is(zero: int, precision: dict[str, Any], compiled: bool) -> None:
    """Same object, class, keys and attributes; what anyone sets on it is seen; its hooks fire once per micro-batch."""
    case = case_of(2, stage=zero, accumulation=2, extra=precision)
    module = staged(2)
    before, heard = face(module), []
    module.register_forward_hook(lambda *_: heard.append("forward"))
    more = {"compile": {"enabled": True, "backend": "aot_eager"}} if compiled else {}
    engine = start(case, 2, module=module, **more)
    engine.module.checkpoint_parallel_write_pipeline = True
    train(engine, case, batches(2, size=case.global_batch))
    assert engine.module is module
    assert isinstance(engine.module, sheer.PipelineModule)
    assert heard == ["forward"] * 4
    assert module.checkpoint_parallel_write_pipeline is engine.checkpoint_parallel_write_pipeline is True
    del module.checkpoint_parallel_write_pipeline
    engine.destroy()
    assert face(module) == before


# --- sharded parameters -----------------------------------------------------------------------------------------------


@pytest.mark.world_size(4)
@pytest.mark.parametrize("more", [{}, {"chunks": 2, "placement": "v"}], ids=["1f1b", "zb-v"])
def test_a_cut_model_is_sharded_under_its_own_names(more: dict[str, Any]) -> None:
    """Parameters that the forward reads outside a call, shared ones, one that nothing uses; the model's own loss."""
    case = case_of(2, stage=3, accumulation=2)
    (tokens,) = batches(1, size=case.global_batch)
    tokens = tokens % 11
    torch.manual_seed(0)
    module = sheer.PipelineModule.from_module(Language(layers=5), blocks="body.blocks.*", num_stages=2, **more)
    engine = start(case, 2, module=module)
    torch.manual_seed(0)
    expected = Language(layers=5)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        mine = [(parts[case.rank], parts[case.rank]) for parts in case.micro_batches(tokens)]
        loss = engine.train_batch(iter(mine))
        reference = expected(tokens, tokens)
        torch.testing.assert_close(loss, reference.detach(), **CLOSE)
        reference.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_parameters(engine, expected)


HOST = {"device": "cpu"}
WAYS: dict[str, dict[str, Any]] = {
    "named blocks": {"zero": {"blocks": ["Block", "*.up"]}},
    "offload, chunks": {"zero": {"offload_param": HOST, "offload_optimizer": HOST}, "module": {"chunks": 2}},
    "recomputed, halved": {
        "pipeline": {"schedule": "zb-v", "activation_checkpoint_interval": 2},
        "module": {"chunks": 2, "placement": "v"},
    },
}


@pytest.mark.world_size(4)
@pytest.mark.parametrize("way", WAYS)
def test_sharded_stages_evaluate_and_train_in_every_way(way: str) -> None:
    """Evaluated before the first step too, when no plan of gathers has been seen."""
    chosen = WAYS[way]
    case = case_of(2, stage=3, accumulation=4)
    zero = {"stage": 3, "reduce_bucket_size": 600, **chosen.get("zero", {})}
    module = staged(2, **chosen.get("module", {}))
    engine = start(case, 2, module=module, zero_optimization=zero, pipeline=chosen.get("pipeline", {}))
    data, found = batches(3, size=case.global_batch), []
    for batch in data:
        mine = [(parts[case.rank], parts[case.rank]) for parts in case.micro_batches(batch)]
        found.append(engine.eval_batch(iter(mine)))
        train(engine, case, [batch])
    expected = whole()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for batch, evaluated in zip(data, found, strict=True):
        loss = cross_entropy(expected(batch), batch)
        torch.testing.assert_close(evaluated, loss.detach(), **CLOSE)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_parameters(engine, expected)
    engine.destroy()
    assert not any(param.isnan().any() for param in module.parameters())


class Weighed(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(31))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(output * self.weight, target)


@pytest.mark.world_size(4)
def test_a_loss_with_parameters_is_sharded_too() -> None:
    case = case_of(2, stage=3, accumulation=2)
    engine = start(case, 2, module=staged(2, loss_fn=Weighed()))
    expected = whole(loss_fn=Weighed())
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for batch in batches(3, size=case.global_batch):
        train(engine, case, [batch])
        expected.loss_fn(expected(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_parameters(engine, expected)
