"""`zero.Init` and `materialize`: the plain constructor's values, never whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist  # noqa: TID251  # names the group of all ranks
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as nn_module
from torch.utils._python_dispatch import TorchDispatchMode

import sheer
import sheer.testing
from sheer.errors import ConfigError, UsageError
from sheer.zero import built_place_of
from tests.engine.models import Odd, batches, odd
from tests.engine.oracle import Case, adamw, assert_same_model, engine_run, plain_run, start, values


class Styled(nn.Module):
    """What constructors do with parameters that they have made before."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(12))
        self.layers = nn.ModuleList([nn.Linear(12, 12) for _ in range(3)])
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(12, 2, 24, dropout=0.0), 2, enable_nested_tensor=False
        )
        self.recurrent = nn.LSTM(12, 12)
        self.norm = nn.BatchNorm1d(12)
        self.tied = nn.Linear(12, 12)
        self.tied.weight = self.layers[0].weight
        kept = self.layers[1].weight.data  # a second way to the same memory
        self.late = nn.Parameter(torch.randn(7))
        self.count = nn.Parameter(torch.tensor(3), requires_grad=False)
        self.apply(self.restyle)
        kept.mul_(0.5)
        with torch.no_grad():
            self.scale.copy_(self.layers[2].weight.sum(0))
            self.late[2:4] = self.scale[:2]
        self.frozen = copy.deepcopy(self.layers[1]).requires_grad_(False)
        nn.init.orthogonal_(self.frozen.weight)
        self.double()

    @staticmethod
    def restyle(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            module.bias.data.zero_()


class Borrowing(nn.Module):
    """What torch itself does with parameters that are there already, and ways around a torch function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.spectral_normed = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(3)])
        self.skipped = torch.nn.utils.skip_init(nn.Linear, 4, 4)
        nn.init.eye_(self.skipped.weight)
        nn.init.zeros_(self.skipped.bias)
        self.halved = nn.Linear(4, 4).half()
        self.loaded = nn.Linear(4, 4)
        self.loaded.load_state_dict({"weight": torch.arange(16.0).view(4, 4), "bias": torch.ones(4)})
        self.replaced = nn.Linear(4, 4)
        del self.replaced.bias
        self.replaced.register_parameter("bias", nn.Parameter(self.replaced.weight.sum(1).detach()))
        self.embedding = nn.Embedding(7, 4, padding_idx=0)
        self.embedding.weight.data[1].fill_(2.0)
        self.row = nn.Parameter(self.embedding.weight.detach()[2:3] * 3)
        with torch.no_grad():
            torch._foreach_mul_([self.loaded.weight, self.row], 2.0)
            norm = torch.nn.utils.parameters_to_vector(self.embedding.parameters()).norm()
            self.norm = nn.Parameter(norm)


def built(make: Callable[[], nn.Module], *, seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    with sheer.zero.Init(**options):
        return make()


@pytest.mark.world_size(2, 3)
def test_values_are_the_plain_constructor_s_whatever_it_does() -> None:
    for make in (Odd, Styled, Borrowing):
        # Rank 0's parameters count; buffers are each rank's own until `initialize`, and one of these draws some.
        model = built(make, seed=5 if sheer.testing.rank() and make is not Borrowing else 0)
        torch.manual_seed(0)
        reference = make()
        sharded = [p for p in model.parameters() if p.is_floating_point() and p.numel()]
        assert all(p.isnan().all() and built_place_of(p) is not None for p in sharded)
        assert [(n, p.shape, p.dtype, p.requires_grad) for n, p in model.named_parameters(remove_duplicate=False)] == [
            (n, p.shape, p.dtype, p.requires_grad) for n, p in reference.named_parameters(remove_duplicate=False)
        ]
        assert_same_model(model, reference, rtol=0, atol=0)
        assert all(p.isnan().all() for p in sharded)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_engine_takes_the_shards_over(stage: int, tmp_path: Path) -> None:
    case = Case(stage=stage, world=2, rank=sheer.testing.rank(), accumulation=2, clip=0.5)
    model, reference = built(Odd), odd()
    objects = dict(model.named_parameters())
    with sheer.zero.GatheredParameters(model.head.weight, modifier_rank=0), torch.no_grad():
        if case.rank == 0:
            model.head.weight[3] = 0.25
    with torch.no_grad():
        reference.head.weight[3] = 0.25
    engine = start(model, case)
    assert all(param is objects[fqn] for fqn, param in model.named_parameters())
    assert not any(built_place_of(param) for param in model.parameters())
    data = batches(3, size=case.global_batch)
    ours = engine_run(engine, case, data[:2])
    engine.save_checkpoint(tmp_path)
    ours += engine_run(engine, case, data[2:])
    expected = plain_run(reference, case, data, optimizer=adamw(reference))
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    reference.seen.copy_(model.seen)
    assert_same_model(model, reference, rtol=1e-5, atol=1e-6)
    again = start(built(Odd, seed=7), case)
    again.load_checkpoint(tmp_path)
    assert engine_run(again, case, data[2:]) == ours[2:]


@pytest.mark.world_size(2)
def test_masters_have_the_bits_that_the_constructor_gave() -> None:
    case = Case(stage=3, world=2, rank=sheer.testing.rank(), extra={"bf16": {"enabled": True}})
    runs = [engine_run(start(model, case), case, batches(3, size=case.global_batch)) for model in (built(Odd), odd())]
    assert runs[0] == runs[1]


@pytest.mark.world_size(2)
def test_a_parameter_that_takes_another_one_s_place_is_the_engine_s_too() -> None:
    model = built(lambda: nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)))
    grown = nn.Embedding(12, 4)
    with sheer.zero.GatheredParameters([model[0].weight, grown.weight], modifier_rank=0):
        if sheer.testing.rank() == 0:
            grown.weight.data[:10] = model[0].weight.data
    model[0].weight = grown.weight
    start(model, Case(stage=3, world=2, rank=sheer.testing.rank()))
    torch.manual_seed(0)
    assert torch.equal(values(model)["0.weight"][:10], nn.Embedding(10, 4).weight)


@pytest.mark.world_size(2)
def test_nothing_is_left_behind() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            raise ZeroDivisionError

    def hooks() -> list[dict[int, Any]]:
        return [dict(nn_module._global_parameter_registration_hooks), dict(nn_module._global_module_registration_hooks)]

    before, linear = hooks(), dict(vars(nn.Linear))
    with pytest.raises(ZeroDivisionError), sheer.zero.Init():
        Failing()
    assert hooks() == before
    with sheer.zero.Init():
        with sheer.zero.Init():
            inner = nn.Linear(3, 3)
        assert not inner.weight.isnan().any()  # the outer one is in charge
        with pytest.raises(UsageError, match=r"inside sheer\.zero\.Init: leave its `with` first"):
            start(inner, Case(stage=3))
    assert inner.weight.isnan().all()
    assert hooks() == before
    assert dict(vars(nn.Linear)) == linear
    assert torch._C._len_torch_function_stack() == 0
    assert not nn.Linear(2, 2).weight.isnan().any()


@pytest.mark.world_size(2)
def test_its_arguments() -> None:
    assert built(lambda: nn.Linear(3, 3), dtype=torch.bfloat16).weight.dtype is torch.bfloat16
    for off in ({"enabled": False}, {"config_dict_or_path": {"zero_optimization": {"stage": 2}}}):
        assert built_place_of(built(lambda: nn.Linear(3, 3), **off).weight) is None
    kinds = {"config": {"zero_optimization": {"stage": 3}}, "data_parallel_group": dist.group.WORLD}
    assert built_place_of(built(lambda: nn.Linear(3, 3), **kinds, remote_device="cpu").weight) is not None
    model, reference = odd(), odd()
    sheer.zero.Init(module=model)
    assert model.embed.weight.isnan().all()
    assert_same_model(model, reference, rtol=0, atol=0)
    with pytest.raises(UsageError, match="zero_quantized_weights=True is not there"):
        sheer.zero.Init(zero_quantized_weights=True)
    with pytest.raises(TypeError, match="no argument 'stage'"):
        sheer.zero.Init(stage=3)
    with pytest.raises(ConfigError):
        sheer.zero.Init(config={"zero_optimisation": {}})


@pytest.mark.world_size(1)
def test_on_one_rank_nothing_happens() -> None:
    assert torch.equal(built(lambda: nn.Linear(3, 3)).weight, built(lambda: nn.Linear(3, 3), enabled=False).weight)


class Wide(nn.Module):
    """Equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(128, 128, bias=False) for _ in range(32)])
        self.layers.apply(lambda m: nn.init.ones_(m.weight) if isinstance(m, nn.Linear) else None)


class Watched(TorchDispatchMode):
    """Counts the bytes of tensors that live at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.device.type == "cpu":
            storage = result.untyped_storage()
            self._live[storage._cdata] = StorageWeakRef(storage)
            del storage
        self._live = {key: one for key, one in self._live.items() if not one.expired()}
        held = (torch.UntypedStorage._new_with_weak_ptr(one.cdata) for one in self._live.values())
        self.peak = max(self.peak, sum(storage.nbytes() for storage in held))
        return result


@pytest.mark.world_size(4)
@pytest.mark.parametrize("how", ["init", "materialize"])
def test_a_rank_never_holds_much_more_than_its_shard(how: str) -> None:
    """32 layers, of which no rank ever holds more than a quarter and three."""
    with Watched() as watched:
        if how == "init":
            model = built(Wide)
        else:
            with torch.device("meta"):
                model = Wide()
            sheer.zero.materialize(model)
        values = sum(param.numel() for param in model.parameters()) * 4
    layer = values // 32
    assert watched.peak <= values // 4 + 3 * layer + 2**14


@pytest.mark.world_size(1, 2)
def test_materialize_gives_the_plain_constructor_s_values() -> None:
    def make() -> Any:
        model = nn.Sequential(nn.Embedding(31, 12), nn.LayerNorm(12), nn.BatchNorm1d(12), nn.Linear(12, 31))
        model[3].weight = model[0].weight
        return model

    torch.manual_seed(0)
    reference = make().state_dict()
    with torch.device("meta"):
        model = make()
    objects = list(model.parameters())
    torch.manual_seed(0)
    sheer.zero.materialize(model)
    assert all(mine is theirs for mine, theirs in zip(model.parameters(), objects, strict=True))
    assert model[3].weight is model[0].weight
    state = values(model)
    assert all(torch.equal(state[key], value) for key, value in reference.items())


@pytest.mark.world_size(2)
def test_materialize_refuses_what_gets_no_value() -> None:
    def fill(module: nn.Module) -> None:
        if isinstance(module, Odd):
            with torch.no_grad():
                module.gain.fill_(1.5)
                module.never.fill_(3.0)
            module.seen.zero_()
            module.scratch.zero_()

    with torch.device("meta"):
        model, another = Odd(), Odd()
    with pytest.raises(UsageError, match=r"module '' \(Odd\) has 'nothing' on the meta device and no reset_parameters"):
        sheer.zero.materialize(another)
    with pytest.raises(UsageError, match=r"Odd\.gain of shape \(\) was on the meta device and got no value"):
        sheer.zero.materialize(another, init_fn=lambda module: None)
    sheer.zero.materialize(model, init_fn=fill)
    case = Case(stage=3, world=2, rank=sheer.testing.rank())
    steps = engine_run(start(model, case), case, batches(3, size=case.global_batch))
    assert steps[0].loss > steps[-1].loss > 0


@pytest.mark.world_size(2)
def test_a_model_of_transformers_is_built_as_ever() -> None:
    transformers = pytest.importorskip("transformers")
    size = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 40, "n_positions": 16}
    auto = {"train_batch_size": "auto", "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto"}}
    make = lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**size))  # noqa: E731
    model = built(make, seed=sheer.testing.rank(), config_dict_or_path=auto)
    torch.manual_seed(0)
    assert all(built_place_of(param) is not None for param in model.parameters())
    assert_same_model(model, make(), rtol=0, atol=0)
