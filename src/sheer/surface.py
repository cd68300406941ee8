"""DeepSpeed's names on an engine, for the scripts that use them: what is read, and calls under a second name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from sheer import device as devices
from sheer import feeding
from sheer.errors import UsageError
from sheer.optim.loss_scale import Scaling
from sheer.zero import GatheredParameters

if TYPE_CHECKING:
    from sheer.comm import Axis, Mesh
    from sheer.comm import Counters as Traffic
    from sheer.config import BatchSizes, Config
    from sheer.config.sections import OffloadOptimizer, OffloadParam
    from sheer.data import ResumableLoader
    from sheer.layout import Layout
    from sheer.observe import StepResult
    from sheer.optim.loss_scale import LossScale
    from sheer.persist import Counters
    from sheer.planning import Plan
    from sheer.zero import ZeroRuntime


_WEIGHTS = (
    "engine.full_state_dict(cpu=True) gives rank 0 all weights, for safetensors or torch.save; `sheer ckpt export` "
    "writes a checkpoint's"
)
_INSTEAD = {
    "save_16bit_model": _WEIGHTS,
    "save_fp16_model": _WEIGHTS,
    "_consolidated_16bit_state_dict": _WEIGHTS,
    "_zero3_consolidated_16bit_state_dict": _WEIGHTS,
    "collect_python_gc": "call gc.collect()",
    "get_batch_info": "engine.train_batch_size(), train_micro_batch_size_per_gpu() and gradient_accumulation_steps()",
}


def instead_of(name: str) -> str:
    """What to write for a name of DeepSpeed's engine that is not here, as the end of a message; empty for others."""
    return f". DeepSpeed's has one; here: {_INSTEAD[name]}" if name in _INSTEAD else ""


class DeepSpeedNames(ABC):
    """Methods and attributes under the names that DeepSpeed's users know. A base of `Engine` only."""

    _config: Config
    _batch: BatchSizes
    _mesh: Mesh
    _applied: bool
    _scale: LossScale | None
    module: torch.nn.Module
    last_step: StepResult | None
    _base: torch.optim.Optimizer | None
    _params: Mapping[str, torch.nn.Parameter]
    _plan: Plan
    _runtime: ZeroRuntime
    counters: Counters

    # --- batch ---

    def train_batch_size(self) -> int:
        """Samples per optimizer step, over all ranks."""
        return self._batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per forward, on one rank."""
        return self._batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step, on one rank."""
        return self._batch.accumulation

    # --- last step ---

    def was_step_applied(self) -> bool:
        """Whether the last `step` call updated parameters (not off the boundary, not on overflow)."""
        return self._applied

    def get_global_grad_norm(self) -> float | None:
        """2-norm of the last step's averaged gradient, before clipping; None before the first step."""
        return None if self.last_step is None else self.last_step.grad_norm

    @property
    def global_steps(self) -> int:
        """Optimizer steps applied so far."""
        return self.counters.global_steps

    @property
    def global_samples(self) -> int:
        """Samples trained on so far, over all ranks."""
        return self.counters.global_samples

    @property
    def micro_steps(self) -> int:
        """Micro-batches finished so far."""
        return self.counters.micro_steps

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because a gradient was not finite."""
        return self.counters.skipped_steps

    # --- plan and traffic ---

    @property
    def layout(self) -> Layout:
        """Where every piece of every parameter lives; prints as a table."""
        return self._plan.layout

    @property
    def traffic(self) -> Traffic:
        """Collectives and bytes that this rank has sent since the engine was built."""
        return self._runtime.lane.counters

    @property
    def axis(self) -> Axis:
        """The data axis."""
        return self._mesh.data

    # --- configuration ---

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as the user gave it."""
        return self._config.raw

    def gradient_clipping(self) -> float:
        """The clipping norm; 0 means off."""
        return self._config.gradient_clipping

    def steps_per_print(self) -> int | None:
        """Steps between log lines; None means never."""
        return self._config.steps_per_print

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return self._config.zero_optimization.stage

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self._config.zero_optimization.stage > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded between micro-batches."""
        return self._config.zero_optimization.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded at rest."""
        return self._config.zero_optimization.stage >= 3

    def fp16_enabled(self) -> bool:
        """Whether parameters are float16."""
        return self._config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Whether parameters are bfloat16."""
        return self._config.bf16.enabled

    def torch_autocast_enabled(self) -> bool:
        """Whether the forward runs under autocast."""
        return self._config.torch_autocast.enabled

    def loss_scale(self) -> float:
        """The fp16 loss scale in force; 1.0 at other precisions."""
        return 1.0 if self._scale is None else self._scale.scale

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale adapts."""
        return self._scale is not None and self._scale.scaling is Scaling.DYNAMIC

    def optimizer_name(self) -> str | None:
        """The optimizer's name in the configuration."""
        return None if self._config.optimizer is None else self._config.optimizer.type

    def optimizer_params(self) -> dict[str, Any] | None:
        """The optimizer's arguments in the configuration."""
        return None if self._config.optimizer is None else dict(self._config.optimizer.params)

    def scheduler_name(self) -> str | None:
        """The schedule's name in the configuration."""
        return None if self._config.scheduler is None else self._config.scheduler.type

    def scheduler_params(self) -> dict[str, Any] | None:
        """The schedule's arguments in the configuration."""
        return None if self._config.scheduler is None else dict(self._config.scheduler.params)

    def get_lr(self) -> list[float]:
        """The learning rate of every parameter group."""
        return [float(group["lr"]) for group in self._groups()]

    def get_mom(self) -> list[Any]:
        """The momentum (or betas) of every parameter group; None where it has none."""
        return [group.get("momentum", group.get("betas")) for group in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self._base is None else self._base.param_groups

    # --- ranks ---

    @property
    def mesh(self) -> Mesh:
        """The axes of ranks: `world`, `data`, `pipe`."""
        return self._mesh

    @property
    def rank(self) -> int:
        """This process's rank of all."""
        return self._mesh.world.rank

    global_rank = rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._mesh.world.size

    @property
    def dp_world_size(self) -> int:
        """Ranks on the data axis."""
        return self._mesh.data.size

    def get_data_parallel_rank(self) -> int:
        """This process's rank on the data axis."""
        return self._mesh.data.rank

    @property
    def data_parallel_group(self) -> Any:
        """The process group of the data axis; None with one process."""
        return self._mesh.data.group

    @property
    def local_rank(self) -> int:
        """This process's index on its machine."""
        return devices.local_rank(rank=self._mesh.world.rank)

    def is_first_stage(self) -> bool:
        """Whether this rank's stage takes the inputs."""
        return self._mesh.stage == 0

    def is_last_stage(self) -> bool:
        """Whether this rank is on the last stage. (Of a V-shaped placement the first one makes the loss.)"""
        return self._mesh.stage == self._mesh.stages - 1

    def get_pipeline_parallel_rank(self) -> int:
        """This process's stage; 0 without a pipeline."""
        return self._mesh.stage

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages; 1 without a pipeline."""
        return self._mesh.stages

    def reset_activation_shape(self) -> None:
        """Nothing: every message says its shapes."""
        return

    def set_has_attention_mask(self, value: bool) -> None:
        """Nothing: a mask travels like any tensor."""
        return

    @property
    def mp_world_size(self) -> int:
        """Ranks that share one tensor: 1, there is no tensor parallelism."""
        return 1

    def get_model_parallel_rank(self) -> int:
        """0: there is no tensor parallelism."""
        return 0

    # --- what it trains ---

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer | None:
        """The torch optimizer underneath `engine.optimizer`."""
        return self._base

    client_optimizer = basic_optimizer

    @property
    def param_names(self) -> dict[torch.nn.Parameter, str]:
        """Parameter -> fully qualified name."""
        return {param: fqn for fqn, param in self._params.items()}

    def get_type(self) -> list[str]:
        """The optimizer's class name, once per parameter group."""
        return [] if self._base is None else [type(self._base).__name__] * len(self._base.param_groups)

    @property
    def communication_data_type(self) -> str | None:
        """The configured wire format of gradients; None means the model's."""
        return self._config.communication_data_type

    def zero_offload_optimizer(self) -> OffloadOptimizer | None:
        """The config's section where it offloads something, else None."""
        section = self._config.zero_optimization.offload_optimizer
        return None if section.device == "none" else section

    def zero_offload_param(self) -> OffloadParam | None:
        """The config's section where it offloads something, else None."""
        section = self._config.zero_optimization.offload_param
        return None if section.device == "none" else section

    def zero_cpu_offload(self) -> bool:
        """Whether the optimizer's state is in host memory."""
        return self._config.zero_optimization.offload_optimizer.device == "cpu"

    def zero_use_cpu_optimizer(self) -> bool:
        """Whether the optimizer works on the host."""
        return self.zero_offload_optimizer() is not None

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The module's own `state_dict`, without frozen parameters if so asked; refused at stage 3."""
        if self._plan.layout.shards_params:
            raise UsageError(
                "module_state_dict at zero_optimization.stage 3: this rank has its shards only. Use "
                "engine.full_state_dict() on every rank, or engine.save_checkpoint"
            )
        state = self.module.state_dict(prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            frozen = {
                prefix + fqn for fqn, p in self.module.named_parameters(remove_duplicate=False) if not p.requires_grad
            }
            state = {fqn: value for fqn, value in state.items() if fqn not in frozen}
        if destination is None:
            return state
        destination.update(state)
        return destination

    def full_state_dict(self, *, rank0_only: bool = True, cpu: bool = True) -> dict[str, torch.Tensor]:
        """`module.state_dict()` with whole tensors of their own, at any stage. Collective on the data axis.

        One tensor is whole at a time beside what is returned. With `rank0_only` the other data ranks get {}. In a
        pipeline it is this stage's. Low-precision parameters come as they compute; a checkpoint has their masters.
        """
        keeps = not rank0_only or self._runtime.axis.rank == 0
        state: dict[str, torch.Tensor] = {}
        done: dict[int, torch.Tensor] = {}
        for fqn, tensor in self.module.state_dict(keep_vars=True).items():
            if not isinstance(tensor, torch.Tensor):
                continue
            if id(tensor) not in done:
                home = self._runtime.placed.home(tensor)
                value = tensor if home is None else home.flat.whole_value(home.position, self._runtime.axis)
                done[id(tensor)] = _copied(value, cpu=cpu) if keeps else tensor
            if keeps:
                state[fqn] = done[id(tensor)]
        return state

    def load_module_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """The module's own `load_state_dict`; masters follow at the next step, save or look. Collective at stage 3,
        where every rank gives the same."""
        with GatheredParameters(self.module):
            self.module.load_state_dict(state_dict, strict=strict)

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = False,
        data_sampler: Iterable[int] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> ResumableLoader:
        """A loader over `dataset` for this rank, as `initialize(training_data=...)` builds one.

        It is the caller's: a checkpoint holds the position of the engine's own loader only. `route` other than "train"
        keeps the order of the data set.
        """
        section = self._config.data_loader
        return feeding.loader(
            dataset,
            config=self._config,
            axis=self._mesh.data,
            micro_batch=self._batch.micro if batch_size is None else batch_size,
            collate_fn=collate_fn,
            shuffle=section.shuffle and route == "train" and data_sampler is None,
            num_workers=section.num_workers if num_local_io_workers is None else num_local_io_workers,
            pin_memory=pin_memory or section.pin_memory,
            sampler=data_sampler,
        )

    # --- second names ---

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside do not communicate."""

    @abstractmethod
    def reduce_now(self, *, to_write: bool = False) -> bool:
        """Reduce this step's gradients before `step`."""

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Many backwards, one reduction: `no_sync`, after which `step` reduces."""
        return self.no_sync()

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Reduce this step's gradients now; the buckets are as they were planned."""
        self.reduce_now()

    def empty_partition_cache(self) -> None:
        """Free what is gathered and not in use; it is gathered again when it is. Nothing at stages 0 to 2."""
        self._runtime.gathering.let_go_of_idle()


def _copied(value: torch.Tensor, *, cpu: bool) -> torch.Tensor:
    device = torch.device("cpu") if cpu else value.device
    return value.detach().to(device, copy=True)
