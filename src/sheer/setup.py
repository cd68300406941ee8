"""From a model and a config to an engine: the recipe, in order."""

from __future__ import annotations

import argparse
import datetime
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch

from sheer import comm, feeding, observe, planning
from sheer import device as devices
from sheer.comm import Axis, Mesh
from sheer.compiler import Compiler
from sheer.config import BatchSizes, Config, resolve_batch
from sheer.data import ResumableLoader
from sheer.engine import Engine, Parts
from sheer.errors import ConfigError, UsageError
from sheer.layout import STAGES, Place, Placement, Split
from sheer.monitor import Monitor, build_monitors
from sheer.observe import Teller
from sheer.optim.handle import ShardedOptimizer
from sheer.optim.loss_scale import build_loss_scale
from sheer.optim.registry import optimizer_factory
from sheer.optim.schedules import build_scheduler
from sheer.pipeline import PipelineModule
from sheer.pipelining import Pipeline, find_schedule
from sheer.schedule import Schedule
from sheer.shards import names_and_ties
from sheer.zero import Units, building_here, built_place_of, placed_of, runtime_of

ConfigSource = Config | Mapping[str, Any] | str | os.PathLike[str]
OptimizerSource = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]


class Initialized(NamedTuple):
    """What `initialize` returns; unpacks as DeepSpeed's four."""

    engine: Engine
    optimizer: ShardedOptimizer | None
    training_dataloader: ResumableLoader | None
    lr_scheduler: Any


def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: OptimizerSource | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: ConfigSource | None = None,
    mesh_param: Any = None,
    config_params: ConfigSource | None = None,
) -> Initialized:
    """Make `model` train as `config` says, without wrapping it. Collective: every rank calls it with the same model.

    Args:
        model: the module to train; it stays the object it is. Its parameters become views of flat buffers.
        optimizer: a torch optimizer over the model's parameters, or a function of the parameters that returns one;
            by default the one `config` names.
        model_parameters: what the config's (or the function's) optimizer trains: parameters or group dicts; by default
            all parameters of the model.
        training_data: a data set; its loader comes back, sharded over ranks and resumable.
        lr_scheduler: a scheduler over `optimizer`, or a function of the optimizer that returns one.
        config: path of a JSON file, a dict, or a `Config`. `config_params` and `args.deepspeed_config` are other
            spellings of it.

    The process group is joined if a launcher (torchrun) describes one and nobody has, and is left when the interpreter
    ends: engines may follow one another. With no launcher one process trains alone.

    Raises:
        ConfigError, UsageError, DataError, CompileError: on every rank, naming what is wrong, before the model is
            touched.
    """
    observe.ensure_handler()
    device = devices.pick(devices.local_rank(rank=comm.rank()))
    devices.activate(device)
    if dist_init_required is not False:
        comm.init_process_group(device)
    world = comm.data_axis()

    def look() -> tuple[torch.nn.Module, Config]:
        _refuse(args, distributed_port=distributed_port, mpu=mpu, mesh_param=mesh_param)
        return _check_model(model), Config.load(_one_config(args, config, config_params))

    leave = ExitStack()
    try:
        module, read = world.together(look, doing="sheer.initialize")
        split = _split_of(module, world)
        mesh = comm.build_mesh(world, stages=split.stages, ties=split.tied.values())
        leave.callback(mesh.close)
        given = _Given(module, optimizer, model_parameters, training_data, lr_scheduler, collate_fn)
        ready = world.together(lambda: _prepare(given, read, split, mesh, device), doing="sheer.initialize")
        _check_same_model(ready.module, mesh.data)
        _check_same_groups(ready.optimizer, mesh.world)
        return _build(ready, mesh, device, leave.close)
    except BaseException:
        leave.close()
        raise


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = None,
    verbose: bool = True,
    timeout: datetime.timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the process group that the launcher (torchrun) describes, as `initialize` does by itself.

    For scripts that communicate before they have an engine. Does nothing where a group was joined, where no launcher
    describes one (one process trains alone), and with `dist_init_required=False`. `timeout` is that of every
    collective; by default torch's. `auto_mpi_discovery`, `verbose` and `config` are without effect.

    Raises UsageError for a backend that is not the device's, and for what only the launcher can say.
    """
    device = devices.pick(devices.local_rank(rank=comm.rank()))
    backend = devices.backend(device)
    if dist_backend not in (None, backend):
        raise UsageError(f"dist_backend={dist_backend!r}: on {device.type} it is {backend!r}; leave it out")
    said = {"distributed_port": distributed_port, "init_method": init_method}
    said |= {key: value for key, value in (("rank", rank), ("world_size", world_size)) if value != -1}
    for name, value in said.items():
        if value is not None:
            raise UsageError(
                f"{name}={value!r}: torchrun says where the ranks meet and which this is; leave it out, or call "
                "torch.distributed.init_process_group yourself before"
            )
    if dist_init_required is not False:
        devices.activate(device)
        comm.init_process_group(device, timeout=None if timeout is None else timeout.total_seconds())


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config FILE` to a script's parser, for `initialize(args=...)`; returns it."""
    group = parser.add_argument_group("sheer", "what sheer.initialize(args) reads")
    group.add_argument("--deepspeed", action="store_true", help="for the script: whether to train by an engine")
    group.add_argument("--deepspeed_config", metavar="FILE", help="the engine's config, JSON")
    return parser


class _Given(NamedTuple):
    """The arguments of `initialize` that are objects."""

    model: torch.nn.Module
    optimizer: OptimizerSource | None
    model_parameters: Iterable[Any] | None
    training_data: Any
    lr_scheduler: Any
    collate_fn: Callable[[list[Any]], Any] | None


class _Pipelined(NamedTuple):
    """A model in stages, and what they do in a step."""

    module: PipelineModule
    schedule: Schedule


class _Ready(NamedTuple):
    """Everything that can be wrong on one rank has been checked; the model has not been touched."""

    module: torch.nn.Module
    split: Split
    pipeline: _Pipelined | None
    config: Config
    batch: BatchSizes
    optimizer: torch.optim.Optimizer | None
    groups: dict[str, int]
    units: Units
    scheduler: Any
    loader: ResumableLoader | None
    compiler: Compiler
    monitors: tuple[Monitor, ...]
    teller: Teller


def _prepare(given: _Given, config: Config, split: Split, mesh: Mesh, device: torch.device) -> _Ready:
    teller = Teller(speaks=mesh.world.rank == 0)
    module = given.model
    batch = resolve_batch(config, mesh.data.size)
    base = _build_optimizer(given, config, split)
    loader = None
    if given.training_data is not None:
        loader = feeding.loader(
            given.training_data, config=config, axis=mesh.data, micro_batch=batch.micro, collate_fn=given.collate_fn
        )
    _say_without_effect(config, teller)
    _say_whole(module, config, mesh, teller)
    compiler = _build_compiler(module, config, teller, device)
    targets = compiler.targets if config.compile.enabled else ()
    return _Ready(
        module=module,
        split=split,
        pipeline=_check_pipeline(module, config, batch),
        config=config,
        batch=batch,
        optimizer=base,
        groups=_group_of(module, split, base, teller),
        units=planning.make_units(module, config=config, targets=targets, split=split, data_ranks=mesh.data.size),
        scheduler=_build_scheduler(given.lr_scheduler, base, config),
        loader=loader,
        compiler=compiler,
        monitors=_build_monitors(config, mesh.world),
        teller=teller,
    )


def _build(ready: _Ready, mesh: Mesh, device: torch.device, leave: Callable[[], None]) -> Initialized:
    ready.module.to(device)
    _start_alike(ready, mesh)
    engine = Engine(
        Parts(
            module=ready.module,
            config=ready.config,
            batch=ready.batch,
            mesh=mesh,
            split=ready.split,
            pipeline=_build_pipeline(ready, mesh, device),
            device=device,
            base_optimizer=ready.optimizer,
            group_of=ready.groups,
            units=ready.units,
            loss_scale=_build_loss_scale(ready.config),
            compiler=ready.compiler,
            monitors=ready.monitors,
            teller=ready.teller,
            leave=leave,
        )
    )
    _say_what_stays_in_memory(engine, ready)
    engine.lr_scheduler = ready.scheduler
    engine.training_dataloader = ready.loader
    if ready.config.compile.enabled:
        try:
            mesh.world.together(ready.compiler.enable, doing="sheer.initialize: compiling")
        except BaseException:
            engine.destroy()
            raise
    return Initialized(engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler)


def _say_what_stays_in_memory(engine: Engine, ready: _Ready) -> None:
    in_files = engine.layout.places.optim is Place.FILES
    if in_files and ready.optimizer is not None and not engine.flat_optimizer().may_step_in_parts:
        ready.teller.warn(
            f'zero_optimization.offload_optimizer.device "nvme": {type(ready.optimizer).__name__} has to step once for '
            "all buckets (it has step hooks, or is none of torch's element-wise ones), so during a step all of its "
            "state may be in memory"
        )


# --- what was given ---------------------------------------------------------------------------------------------------


def _refuse(args: Any, *, distributed_port: int | None, mpu: Any, mesh_param: Any) -> None:
    if isinstance(args, torch.nn.Module):
        raise UsageError("the first positional argument is args, as in DeepSpeed; pass the model as model=...")
    if mpu is not None or mesh_param is not None:
        raise UsageError("mpu and mesh_param are not supported: there is one data-parallel axis of all ranks")
    if distributed_port is not None and "MASTER_PORT" not in os.environ:
        raise UsageError(
            f"distributed_port={distributed_port} has no effect here: the launcher chooses the port "
            "(torchrun --master-port)"
        )


def _one_config(args: Any, config: ConfigSource | None, config_params: ConfigSource | None) -> ConfigSource:
    from_args = getattr(args, "deepspeed_config", None)
    given = {"config": config, "config_params": config_params, "args.deepspeed_config": from_args}
    present = {name: value for name, value in given.items() if value is not None}
    if len(present) != 1:
        found = f"found {' and '.join(present)}" if present else f"found none of {', '.join(given)}"
        raise ConfigError(f"give the config once, as config=path, dict or Config; {found}")
    return cast(ConfigSource, next(iter(present.values())))


def _check_model(model: torch.nn.Module | None) -> torch.nn.Module:
    if isinstance(model, type):
        raise UsageError(f"model must be a torch.nn.Module, not the class {model.__name__}; pass an instance of it")
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
        raise UsageError(f"model is wrapped in {type(model).__name__}; pass the module inside it (model.module)")
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for fqn, tensor in tensors:
        if tensor.is_meta:
            raise UsageError(
                f"{fqn!r} is on the meta device and has no values; call sheer.zero.materialize(model) first"
            )
        if torch.nn.parameter.is_lazy(tensor):
            raise UsageError(f"{fqn!r} is a lazy parameter without a shape; run one forward before sheer.initialize")
    if building_here() is not None:
        raise UsageError("sheer.initialize inside sheer.zero.Init: leave its `with` first")
    found = (fqn for fqn, p in model.named_parameters() if placed_of(p) is not None and built_place_of(p) is None)
    taken = next(found, None)
    if taken is not None and runtime_of(model.get_parameter(taken)) is None:
        raise UsageError(
            f"parameter {taken!r} is sharded by an engine that is gone: at stage 3 values live in the engine. Keep it, "
            "and call its destroy() before another is built"
        )
    if taken is not None:
        raise UsageError(f"parameter {taken!r} is already trained by an engine; call its destroy() first")
    _check_memory(model)
    return model


def _check_memory(model: torch.nn.Module) -> None:
    """Two Parameter objects over one memory would come apart in flat buffers; refuse what is a tie in disguise."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for fqn, param in model.named_parameters():
        if param.numel() and param.layout is torch.strided and built_place_of(param) is None:
            start = param.data_ptr()
            stop = start + param.element_size() * (
                1 + sum((n - 1) * s for n, s in zip(param.shape, param.stride(), strict=True))
            )
            spans.setdefault(param.untyped_storage().data_ptr(), []).append((start, stop, fqn))
    for found in spans.values():
        found.sort()
        for (_, stop, first), (start, _, second) in pairwise(found):
            if start < stop:
                raise UsageError(
                    f"parameters {first!r} and {second!r} are two Parameter objects over the same memory; tie them by "
                    "assigning one Parameter to both places"
                )


def _say_without_effect(config: Config, teller: Teller) -> None:
    if config.without_effect:
        keys = ", ".join(config.without_effect)
        teller.info(f"config keys of DeepSpeed's that have no effect here: {keys} (`sheer config explain` says why)")


def _say_whole(module: torch.nn.Module, config: Config, mesh: Mesh, teller: Teller) -> None:
    """What was built in shards does not stay so below stage 3."""
    stage = config.zero_optimization.stage
    built = sum(built_place_of(param) is not None for param in module.parameters())
    if built and STAGES[stage].param is Placement.REPLICATED:
        teller.info(
            f"stage {stage} keeps parameters whole on every rank: {built} that zero.Init sharded are put together"
        )


# --- optimizer and schedule -------------------------------------------------------------------------------------------


def _build_optimizer(source: _Given, config: Config, split: Split) -> torch.optim.Optimizer | None:
    given = source.optimizer
    if isinstance(given, torch.optim.Optimizer):
        if isinstance(given, ShardedOptimizer):
            raise UsageError("optimizer is an engine's own; pass the torch optimizer you would train with")
        return given
    chosen = source.model.parameters() if source.model_parameters is None else source.model_parameters
    parameters: list[Any] = list(chosen)
    if split.stages == 1 or any(not isinstance(one, torch.Tensor) or one.requires_grad for one in parameters):
        return _optimizer_over(parameters, given, config)
    # A stage may have nothing to train; torch's optimizers want a parameter all the same.
    stand_in = torch.nn.Parameter(torch.empty(0, 0))
    built = _optimizer_over([*parameters, stand_in], given, config)
    if built is not None:
        built.state.pop(stand_in, None)
        for group in built.param_groups:
            group["params"] = [param for param in group["params"] if param is not stand_in]
    return built


def _optimizer_over(parameters: list[Any], given: Any, config: Config) -> torch.optim.Optimizer | None:
    """The one that the function `given` returns, or the config's."""
    if given is not None:
        if not callable(given):
            raise UsageError(
                f"optimizer must be a torch optimizer or a function returning one, not {type(given).__name__}"
            )
        built = given(parameters)
        if not isinstance(built, torch.optim.Optimizer):
            raise UsageError(f"the optimizer function returned {type(built).__name__}, not a torch optimizer")
        return built
    if config.optimizer is None:
        return None
    if not parameters:
        raise UsageError("the model has no parameters for the optimizer in the config to train")
    recipe = optimizer_factory(config.optimizer.type, config.optimizer.params)
    try:
        return recipe.cls(parameters, **recipe.kwargs)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"optimizer.type={config.optimizer.type!r} cannot be built over these parameters with {recipe.kwargs}: "
            f"{error}. Choose its parameters by model_parameters, or give an optimizer to sheer.initialize"
        ) from error


def _group_of(
    module: torch.nn.Module, split: Split, base: torch.optim.Optimizer | None, teller: Teller
) -> dict[str, int]:
    """Parameter name -> index of its group. Parameters in no group are said: they would silently never train."""
    if base is None:
        return {}
    params, _ties = names_and_ties(module, split)
    names = {id(param): fqn for fqn, param in params.items()}
    groups: dict[str, int] = {}
    for number, group in enumerate(base.param_groups):
        for position, param in enumerate(group["params"]):
            if id(param) not in names:
                raise UsageError(
                    f"optimizer group {number}, parameter {position} of shape {tuple(param.shape)} is not a parameter "
                    "of the model; build the optimizer over model.parameters() of the model that is passed"
                )
            groups[names[id(param)]] = number
    left_out = [fqn for fqn, param in params.items() if param.requires_grad and fqn not in groups]
    if left_out:
        teller.warn(
            f"{len(left_out)} parameters that require grad are in no optimizer group and will not train: "
            f"{', '.join(left_out[:5])}{' ...' if len(left_out) > 5 else ''}"
        )
    return groups


def _build_scheduler(given: Any, base: torch.optim.Optimizer | None, config: Config) -> Any:
    if given is not None and (isinstance(given, torch.optim.lr_scheduler.LRScheduler) or not callable(given)):
        return given
    if given is None and config.scheduler is None:
        return None
    if base is None:
        raise UsageError(
            "a scheduler needs an optimizer: give one to sheer.initialize, or set `optimizer` in its config"
        )
    if given is not None:
        return given(base)
    assert config.scheduler is not None
    return build_scheduler(config.scheduler.type, config.scheduler.params, base)


def _build_loss_scale(config: Config) -> Any:
    section, autocast = config.fp16, config.torch_autocast
    if not section.enabled and not (autocast.enabled and autocast.dtype == "float16"):
        return None
    return build_loss_scale(
        loss_scale=section.loss_scale,
        initial_scale_power=section.initial_scale_power,
        loss_scale_window=section.loss_scale_window,
        hysteresis=section.hysteresis,
        consecutive_hysteresis=section.consecutive_hysteresis,
        min_loss_scale=section.min_loss_scale,
    )


# --- the rest ---------------------------------------------------------------------------------------------------------


def _split_of(module: torch.nn.Module, world: Axis) -> Split:
    """How the model is split over pipeline stages. Collective on `world`: all ranks must mean the same split."""
    split = Split()
    if isinstance(module, PipelineModule):
        split = Split(
            module.num_stages,
            module.stage,
            module.canonical,
            module.tied,
            chunks=module.chunks,
            chunk_of=module.chunk_of(),
            calls=module.calls(),
        )
    mine, first = (split.stages, dict(split.tied)), world.broadcast_object((split.stages, dict(split.tied)))
    error, place = None, world.rank * split.stages // world.size
    if mine != first:
        error = UsageError(
            f"the model is split into {mine[0]} stages that share {sorted(mine[1])} here, and into {first[0]} that "
            f"share {sorted(first[1])} on rank 0; build the same PipelineModule on every rank"
        )
    elif split.stage != place:
        error = UsageError(
            f"rank {world.rank} of {world.size} was given stage {split.stage} of {split.stages}, its place is stage "
            f"{place}: leave `stage` out, and build the PipelineModule after the process group is up"
        )
    world.agree(error, doing="sheer.initialize: comparing the split of all ranks")
    return split


def _check_same_model(module: torch.nn.Module, axis: Axis) -> None:
    mine = {fqn: (tuple(p.shape), str(p.dtype), p.requires_grad) for fqn, p in module.named_parameters()}
    error = None
    reference = axis.broadcast_object(mine)
    for fqn in sorted(mine.keys() | reference.keys()):
        if mine.get(fqn) != reference.get(fqn):
            error = UsageError(
                f"parameter {fqn!r} is {mine.get(fqn, 'absent')} here and {reference.get(fqn, 'absent')} on rank 0; "
                "build the same model on every rank"
            )
            break
    axis.agree(error, doing="sheer.initialize: comparing the model of all ranks")


def _check_same_groups(base: torch.optim.Optimizer | None, world: Axis) -> None:
    """A group is one thing on all stages: checkpoints keep its settings once, and a shared parameter obeys one."""
    plain = (bool, int, float, str, tuple)
    groups: list[dict[str, Any]] = [
        {key: value for key, value in group.items() if isinstance(value, plain)}
        for group in ([] if base is None else base.param_groups)
    ]
    told: list[list[dict[str, Any]]] = world.gather_objects(groups)
    for rank, theirs in enumerate(told):
        if len(theirs) != len(told[0]):
            raise UsageError(
                f"the optimizer has {len(theirs)} groups on rank {rank} and {len(told[0])} on rank 0; give all ranks "
                "the same groups in the same order, with no parameters where a stage has none for one"
            )
        for number, (group, first) in enumerate(zip(theirs, told[0], strict=True)):
            key = next((key for key in sorted(first.keys() | group.keys()) if group.get(key) != first.get(key)), None)
            if key is not None:
                raise UsageError(
                    f"optimizer group {number} has {key}={group.get(key)!r} on rank {rank} and {first.get(key)!r} on "
                    "rank 0; give all ranks the same groups, and put parameters with other settings into one of their "
                    "own"
                )


def _start_alike(ready: _Ready, mesh: Mesh) -> None:
    """Shared parameters as their first stage has them, buffers as the first rank of a stage; parameters follow that
    when their buckets are filled."""
    params, _ties = names_and_ties(ready.module, ready.split)
    shared = sorted((holders, fqn) for fqn, holders in ready.split.tied.items() if mesh.stage in holders)
    for holders, fqn in shared:  # in one order on all stages
        _broadcast(params[fqn], mesh.ties[holders])
    for buffer in ready.module.buffers():
        _broadcast(buffer, mesh.data)


def _broadcast(tensor: torch.Tensor, axis: Axis) -> None:
    contiguous = tensor.detach().contiguous()
    axis.broadcast(contiguous)
    if contiguous.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(contiguous)


def _check_pipeline(module: torch.nn.Module, config: Config, batch: BatchSizes) -> _Pipelined | None:
    """The module and its schedule, if it is a pipeline; the config must fit it."""
    section = config.pipeline
    stages = module.num_stages if isinstance(module, PipelineModule) else 1
    if section.stages not in (None, stages):
        raise ConfigError(
            f"pipeline.stages is {section.stages}, but the model has {stages}: build it by "
            f"PipelineModule(..., num_stages={section.stages}) or PipelineModule.from_module, or leave the key out"
        )
    if not isinstance(module, PipelineModule):
        return None
    return _Pipelined(module, find_schedule(section.schedule, module, batch.accumulation))


def _build_pipeline(ready: _Ready, mesh: Mesh, device: torch.device) -> Pipeline | None:
    if ready.pipeline is None:
        return None
    module, schedule = ready.pipeline
    section = ready.config.pipeline
    if section.activation_checkpoint_interval:
        module.set_checkpoint_interval(section.activation_checkpoint_interval)
    return Pipeline(module, asked=section.schedule, schedule=schedule, mesh=mesh, device=device, teller=ready.teller)


def _build_compiler(module: torch.nn.Module, config: Config, teller: Teller, device: torch.device) -> Compiler:
    """Found to work, if it is to compile: later the model would have been changed already."""
    section = config.compile
    compiler = Compiler(module, backend=section.backend, kwargs=section.kwargs, scope=section.scope, teller=teller)
    if section.enabled:
        compiler.check(device=device)
    return compiler


def _build_monitors(config: Config, axis: Axis) -> Any:
    if axis.rank != 0:
        return ()
    return tuple(build_monitors(csv_monitor=config.csv_monitor, tensorboard=config.tensorboard, wandb=config.wandb))
