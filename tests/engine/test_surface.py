"""DeepSpeed's names give what they say."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import sheer
from sheer.errors import UsageError
from tests.engine.models import batches, odd

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 3,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.8, 0.9]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 7}},
    "gradient_clipping": 0.7,
    "zero_optimization": {"stage": 2},
    "steps_per_print": 5,
    "communication_data_type": "fp32",
}


def test_configuration_reads_back() -> None:
    engine = sheer.initialize(model=odd(), config=CONFIG)[0]
    assert engine.config == CONFIG
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (6, 2)
    assert engine.gradient_accumulation_steps() == 3
    assert engine.gradient_clipping() == 0.7
    assert engine.steps_per_print() == 5
    assert engine.communication_data_type == "fp32"
    assert engine.zero_optimization() is True
    assert engine.zero_optimization_stage() == 2
    assert engine.zero_optimization_partition_gradients() is True
    assert engine.zero_optimization_partition_weights() is False
    assert (engine.fp16_enabled(), engine.bfloat16_enabled(), engine.torch_autocast_enabled()) == (False, False, False)
    assert (engine.loss_scale(), engine.dynamic_loss_scale()) == (1.0, False)
    assert (engine.optimizer_name(), engine.scheduler_name()) == ("AdamW", "WarmupLR")
    assert engine.optimizer_params() == {"lr": 0.01, "betas": [0.8, 0.9]}
    assert engine.scheduler_params() == {"warmup_max_lr": 0.02, "warmup_num_steps": 7}
    assert engine.zero_offload_optimizer() is None
    assert engine.zero_offload_param() is None
    assert not engine.zero_cpu_offload()
    assert not engine.zero_use_cpu_optimizer()


def test_ranks_of_one_process() -> None:
    engine = sheer.initialize(model=odd(), config=CONFIG)[0]
    assert (engine.rank, engine.global_rank, engine.local_rank, engine.get_data_parallel_rank()) == (0, 0, 0, 0)
    assert (engine.world_size, engine.dp_world_size, engine.mp_world_size) == (1, 1, 1)
    assert engine.get_model_parallel_rank() == 0
    assert engine.data_parallel_group is None


@pytest.mark.world_size(2)
def test_ranks_of_two(world_size) -> None:
    engine = sheer.initialize(model=odd(), config=CONFIG)[0]
    ranks = sheer.testing.rank()
    assert engine.rank == engine.global_rank == engine.local_rank == engine.get_data_parallel_rank() == ranks
    assert engine.world_size == engine.dp_world_size == world_size
    assert engine.data_parallel_group is engine.axis.group is not None


def test_counters_and_the_last_step() -> None:
    model = odd()
    engine = sheer.initialize(model=model, config=CONFIG)[0]
    assert engine.get_global_grad_norm() is None
    applied = []
    for tokens in batches(6, size=2):
        engine.backward(engine(tokens))
        engine.step()
        applied.append(engine.was_step_applied())
    assert applied == [False, False, True] * 2
    assert (engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps) == (2, 6, 12, 0)
    assert engine.get_global_grad_norm() == engine.last_step.grad_norm > 0
    assert engine.get_lr() == [group["lr"] for group in engine.optimizer.param_groups]
    assert engine.get_mom() == [(0.8, 0.9)]
    assert engine.get_type() == ["AdamW"]
    assert type(engine.basic_optimizer) is type(engine.client_optimizer) is torch.optim.AdamW


def test_module_state_and_names() -> None:
    model = odd()
    engine = sheer.initialize(model=model, config=CONFIG)[0]
    names = engine.param_names
    assert names[model.embed.weight] == "embed.weight"
    assert len(names) == len(list(model.parameters()))
    state = engine.module_state_dict()
    assert list(state) == list(model.state_dict())
    without = engine.module_state_dict(prefix="m.", exclude_frozen_parameters=True)
    assert set(state) - {name.removeprefix("m.") for name in without} == {"frozen.weight", "frozen.bias"}
    assert engine.module_state_dict({"other": 1}).keys() == {"other", *state}
    engine.load_module_state_dict({name: torch.zeros_like(value) for name, value in state.items()})
    assert not any(param.any() for param in model.parameters())


def test_batch_sizes_change_between_steps_only() -> None:
    engine = sheer.initialize(model=odd(), config=CONFIG)[0]
    engine.set_train_batch_size(8)
    assert engine.gradient_accumulation_steps() == 4
    with pytest.raises(UsageError, match=r"set_train_batch_size\(7\): not a multiple of micro-batch 2 x 1 ranks = 2"):
        engine.set_train_batch_size(7)
    engine.set_train_micro_batch_size(5)
    assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (20, 4)
    engine.backward(engine(batches(1, size=2)[0]))
    engine.step()
    with pytest.raises(UsageError, match=r"in the middle of a step \(1 of 4 micro-batches done\)"):
        engine.set_train_batch_size(10)
    engine.flush()
    engine.set_train_batch_size(10)
    with pytest.raises(UsageError, match="at least 1"):
        engine.set_train_micro_batch_size(0)


def test_coalesced_backwards_reduce_once() -> None:
    model, reference = odd(), odd()
    tokens = batches(1, size=2)[0]
    engine = sheer.initialize(model=model, config={**CONFIG, "gradient_accumulation_steps": 1})[0]
    with engine.coalesce_grad_reduction():
        engine.backward(engine(tokens))
        engine.backward(engine(tokens))
    engine.allreduce_gradients()
    engine.empty_partition_cache()
    (reference(tokens) + reference(tokens)).backward()
    expected = sum(p.grad.square().sum() for p in reference.parameters() if p.grad is not None).sqrt()
    torch.testing.assert_close(engine.step().grad_norm, float(expected), rtol=1e-5, atol=0)


def test_what_the_engine_lacks_is_the_modules() -> None:
    model = odd()
    model.note = "kept"
    engine = sheer.initialize(model=model, config=CONFIG)[0]
    assert engine.note == "kept"
    assert engine.embed is model.embed
    with pytest.raises(AttributeError, match=r"neither the engine nor its module \(Odd\) has an attribute 'nope'"):
        engine.nope  # noqa: B018
    assert not isinstance(engine, nn.Module)


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_step_without_gradients_is_refused_and_nothing_moves(stage: int) -> None:
    config = {**CONFIG, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": stage}}
    engine = sheer.initialize(model=odd(), config=config)[0]
    lr = engine.get_lr()
    with pytest.raises(UsageError, match=r"step without gradients: no parameter has one on any rank"):
        engine.step()
    assert (engine.global_steps, engine.micro_steps, engine.get_lr()) == (0, 0, lr)
    engine.backward(engine(batches(1, size=2)[0]))
    assert engine.step().step == 1


def test_train_batch_passes_what_a_tuple_data_set_gives() -> None:
    class Two(nn.Linear):
        def forward(self, x, y):
            return (super().forward(x) - y).square().mean()

    data = torch.utils.data.TensorDataset(torch.randn(8, 3), torch.randn(8, 1))
    engine = sheer.initialize(model=Two(3, 1), config=CONFIG, training_data=data)[0]
    assert engine.train_batch().dim() == 0
    assert isinstance(next(iter(engine.training_dataloader)), tuple)


def test_micro_steps_count_micro_batches() -> None:
    engine = sheer.initialize(model=odd(), config=CONFIG)[0]
    for tokens in batches(5, size=2):
        engine.backward(engine(tokens))
        engine.step()
    assert (engine.micro_steps, engine.global_steps) == (5, 1)
    engine.flush()
    assert (engine.micro_steps, engine.global_steps) == (5, 2)
    engine.set_gradient_accumulation_boundary(False)
    for number, tokens in enumerate(batches(3, size=2)):
        engine.set_gradient_accumulation_boundary(number == 2)
        engine.backward(engine(tokens))
    engine.step()
    assert (engine.micro_steps, engine.global_steps) == (8, 3)


@pytest.mark.world_size(2)
def test_rank_0_alone_prints_and_writes(tmp_path, caplog: pytest.LogCaptureFixture) -> None:
    config = {
        **CONFIG,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 2,
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "run"},
    }
    engine = sheer.initialize(model=odd(), config=config)[0]
    rank = sheer.testing.rank()
    with caplog.at_level(logging.INFO, logger="sheer"):
        for tokens in batches(5, size=2):
            engine.backward(engine(tokens))
            engine.step()
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("step ")]
    assert [line.split()[1] for line in lines] == (["2", "4"] if rank == 0 else [])
    engine.axis.barrier()
    engine.destroy()
    engine.axis.barrier()
    written = {path.name: path.read_text().splitlines() for path in tmp_path.rglob("*.csv")}
    assert {"loss", "lr", "grad_norm"} <= {name.removesuffix(".csv") for name in written}
    assert all(len(content) == 1 + 5 for content in written.values())  # a head, and one line per step by one rank


@pytest.mark.world_size(2)
def test_deepspeed_io_deals_a_data_set_out() -> None:
    engine = sheer.initialize(model=odd(), config=CONFIG)[0]
    rank = sheer.testing.rank()
    ordered = [batch.tolist() for batch in engine.deepspeed_io(list(range(12)), batch_size=3, route="eval")]
    assert ordered == ([[0, 1, 2], [6, 7, 8]] if rank == 0 else [[3, 4, 5], [9, 10, 11]])
    shuffled = [batch.tolist() for batch in engine.deepspeed_io(list(range(12)))]
    everything = engine.axis.gather_objects(shuffled)
    assert sorted(i for own in everything for batch in own for i in batch) == list(range(12))
    assert shuffled != [batch.tolist() for batch in engine.deepspeed_io(list(range(12)), route="eval")]


def test_a_name_that_only_deepspeed_has_says_what_to_write() -> None:
    engine = sheer.initialize(model=odd(), config=CONFIG)[0]
    with pytest.raises(AttributeError, match=r"'save_16bit_model'. DeepSpeed's has one; here: engine.full_state_dict"):
        _ = engine.save_16bit_model
    assert sheer.utils.RepeatingLoader is sheer.RepeatingLoader
