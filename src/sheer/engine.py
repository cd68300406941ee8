"""The engine: owns the counters, wires the rooms, runs schedules over a layout.

It reads top to bottom: the verbs of a micro-batch, the step, what a user may change between steps, checkpoints, end.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import Any, NamedTuple, final

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils import _pytree

from sheer import feeding, planning, statistics
from sheer.batches import BatchVerbs
from sheer.checkpoint import Background
from sheer.checkpoints import CheckpointVerbs
from sheer.comm import Mesh
from sheer.compiler import Compiler
from sheer.compiling import CompileVerbs
from sheer.config import BatchSizes, Config
from sheer.data import ResumableLoader
from sheer.errors import UsageError
from sheer.layout import Placement, Split
from sheer.monitor import Monitor
from sheer.observe import StepResult, Teller
from sheer.offloading import OffloadStateTypeEnum, OffloadVerbs
from sheer.optim.flat import FlatOptimizer
from sheer.optim.handle import ShardedOptimizer
from sheer.optim.loss_scale import LossScale
from sheer.persist import Counters
from sheer.pipelining import Pipeline
from sheer.shards import names_and_ties, replaced
from sheer.surface import DeepSpeedNames, instead_of
from sheer.zero import Units, find_units, inside_backward


class Parts(NamedTuple):
    """What `initialize` has built."""

    module: torch.nn.Module
    config: Config
    batch: BatchSizes
    mesh: Mesh
    split: Split
    pipeline: Pipeline | None
    """What runs the module where it is a `PipelineModule`."""
    device: torch.device
    base_optimizer: torch.optim.Optimizer | None
    group_of: Mapping[str, int]
    """Parameter name -> index of its optimizer group."""
    units: Units
    """What is gathered together, where parameters are sharded."""
    loss_scale: LossScale | None
    compiler: Compiler
    monitors: tuple[Monitor, ...]
    teller: Teller
    leave: Callable[[], None]
    """Lets go of the process groups that `initialize` made."""


@final
class Engine(OffloadVerbs, BatchVerbs, CheckpointVerbs, CompileVerbs, DeepSpeedNames):
    """Trains `module`, which stays the user's object. Built by `sheer.initialize`.

    All ranks make the same calls in the same order: `engine(...)`, `backward`, `step`, saves and loads are collective
    on all ranks.
    """

    def __init__(self, parts: Parts) -> None:
        self.module = parts.module
        self.device = parts.device
        self.lr_scheduler: Any = None
        self.training_dataloader: ResumableLoader | None = None
        self.last_step: StepResult | None = None
        self.counters = Counters()
        self._config = parts.config
        self._batch = parts.batch
        self._mesh = parts.mesh
        self._split = parts.split
        self._pipeline = parts.pipeline
        self._group_of = parts.group_of
        self._base = parts.base_optimizer
        self._scale = parts.loss_scale
        self._compiler = parts.compiler
        self._monitors = parts.monitors
        self._teller = parts.teller
        self._leave = parts.leave
        self._window = 0  # micro-batches finished since the last update
        self._forced_boundary: bool | None = None
        self._syncing = True
        self._divide = True  # whether this window is averaged over its micro-batches
        self._scaled = False  # whether the user asked for the loss scale in this micro-batch
        self._losses: list[torch.Tensor] = []
        self._applied = False
        self._trouble_told = False  # the compile report has been printed
        self._alive, self._torn = True, False
        self._background = Background()
        self._away = frozenset[OffloadStateTypeEnum]()
        self._own_iterator: Iterator[Any] | None = None
        self._params, self._ties = names_and_ties(parts.module, parts.split)
        self._islands = planning.fp32_islands(parts.module)
        self._units = parts.units
        self._flags = self._trainable_now()
        self._plan = planning.build(self._params, base=self._base, **self._circumstances())
        self._runtime = self._plan.runtime
        self.optimizer = None if self._base is None else self._make_handle(self._base)
        self._attach()

    def _circumstances(self) -> dict[str, Any]:
        return {
            "config": self._config,
            "group_of": self._group_of,
            "islands": self._islands,
            "units": self._units,
            "split": self._split,
            "mesh": self._mesh,
            "device": self.device,
        }

    def _trainable_now(self) -> tuple[bool, ...]:
        return tuple(map(attrgetter("requires_grad"), self._params.values()))

    def _frozen_changed(self) -> bool:
        return self._flags != self._trainable_now()

    def _make_handle(self, base: torch.optim.Optimizer) -> ShardedOptimizer:
        return ShardedOptimizer(base, step=_weak(self.step), zero_grad=_weak(self.zero_grad))

    def _attach(self) -> None:
        self._runtime.owner = weakref.ref(self)
        for fqn, gate in self._runtime.gates.items():
            self._compiler.set_gate(fqn, gate)
        self._arm()

    def _plan_changed(self) -> bool:
        return self._frozen_changed() or bool(self._runtime.gathering.read_outside)

    def _replan(self) -> None:
        """Parameters were frozen or unfrozen, or go into other units: new buckets, every state kept under its
        parameter's name."""
        self._background.settle()
        self._runtime.heed_user()
        moved = self._runtime.gathering.read_outside
        if moved:
            self._units = find_units(
                self.module, self._units.blocks, outside=self._units.outside | moved, split=self._split
            )
        traffic = self.traffic
        self._plan = planning.rebuild(self._plan, self._params, **self._circumstances())
        self._flags = self._trainable_now()
        self._runtime = self._plan.runtime
        self._runtime.count_on(traffic)
        self._attach()
        self._teller.info(
            f"stage 3: {len(moved)} parameters ({min(moved)!r}, ...) are read outside the call of their block, so they "
            "are gathered with what is in no block"
            if moved
            else f"requires_grad changed: {sum(self._flags)} of {len(self._flags)} parameters train now"
        )

    # --- a micro-batch ----------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on this rank's inputs (moved to the engine's device) and return its output unchanged."""
        self._before_forward()
        args, kwargs = self._to_device((args, kwargs))
        try:
            with self._autocast():
                outputs = self.module(*args, **kwargs)
        except RuntimeError as error:
            feeding.note_dtypes(error, (args, kwargs), config=self._config)
            raise
        self._runtime.watch(outputs)
        return outputs

    forward = __call__

    def _before_forward(self) -> None:
        self._check_alive()
        self._refuse_by_hand("engine(...)")
        self._require_here(evaluating=not torch.is_grad_enabled())
        self._compiler.keep_gates()
        if not torch.is_grad_enabled() or inside_backward():
            return  # evaluation may run on some ranks only, so it communicates nothing
        self._abandon_unfinished()
        self._heed_outside()
        self._heed_unfrozen()

    def _abandon_unfinished(self) -> None:
        if self._runtime.running and not inside_backward():
            self._abandon("the last backward did not finish")

    def _heed_outside(self) -> None:
        """Parameters of a block that are read outside it belong to what is in no block: a new plan, between steps."""
        if self._runtime.gathering.read_outside and not (self._window or self._runtime.dirty):
            self._replan()

    def _heed_unfrozen(self) -> None:
        """Parameters that train now and did not when planned need room for gradients: a new plan, between steps.

        Frozen ones can wait for the end of a step taken without them. (A GAN freezes its critic for half an iteration.)
        """
        now = self._trainable_now()
        fresh = [fqn for fqn, is_, was in zip(self._params, now, self._flags, strict=True) if is_ and not was]
        if not fresh:
            return
        if self._window == 0 and not self._runtime.dirty:
            self._replan()
            return
        self._teller.warn_once(
            f"unfrozen {fresh}",
            f"requires_grad of {len(fresh)} parameters ({fresh[0]!r}, ...) was set in the middle of a step: they train "
            "from the next step on",
        )

    def _autocast(self) -> Any:
        section = self._config.torch_autocast
        if not section.enabled:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=getattr(torch, section.dtype))

    def _to_device(self, batch: Any) -> Any:
        if isinstance(batch, torch.Tensor):
            return batch.to(self.device, non_blocking=True)
        return _pytree.tree_map_only(torch.Tensor, lambda t: t.to(self.device, non_blocking=True), batch)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Accumulate the gradients of `loss`, a scalar: this rank's mean over its micro-batch. Returns `loss`.

        Gradients are averaged over micro-batches and ranks when they are reduced; `scale_wrt_gas=False` leaves the
        average over micro-batches to the caller. May be called several times in one micro-batch, equally often on all
        ranks. If the backward fails, the step's gradients so far are forgotten and the engine stays usable.
        """
        self._check_alive()
        self._refuse_by_hand("engine.backward")
        self._require_here()
        self._check_loss(loss)
        self._abandon_unfinished()
        self._divide = scale_wrt_gas
        self._arm()
        try:
            with self._runtime.backward():
                self._times_scale(loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        except BaseException:
            self._abandon("backward failed")
            raise
        self._losses.append(loss.detach())
        return loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` times the fp16 loss scale, for a plain `.backward()`; unchanged at other precisions."""
        self._scaled = True
        return self._times_scale(loss)

    def _times_scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self._scale is None else loss.float() * self._scale.scale

    def _check_loss(self, loss: object) -> None:
        if not isinstance(loss, torch.Tensor):
            raise UsageError(f"backward needs the loss as a tensor, not {type(loss).__name__}")
        if loss.numel() != 1:
            raise UsageError(
                f"backward needs a scalar loss, not shape {tuple(loss.shape)}; take its mean() (each rank's own mean)"
            )
        if not loss.requires_grad:
            raise UsageError(
                "the loss depends on no parameter that trains: it was computed under no_grad, detached, or every "
                "parameter it uses is frozen"
            )
        self._runtime.gathering.check_loss(loss)
        if self._runtime.gathering.learning and bool(loss.isnan()):
            self._teller.warn_once(
                "nan at stage 3",
                "the loss of the first step is not a number. At stage 3 a parameter is NaN where it is read outside "
                "the model's forward, or by another block without a gradient: read it inside "
                "sheer.zero.GatheredParameters, or call sheer.zero.register_external_parameter(model, parameter)",
            )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside do not communicate; the next one outside, or `step`, reduces what they left.

        At stage 2 the gradients wait whole, so this costs the memory that stage 2 saves. `step` inside is refused.
        """
        self._check_alive()
        self._refuse_by_hand("engine.no_sync")
        self._syncing = False
        self._arm()
        try:
            yield
        finally:
            self._syncing = True
            self._arm()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the step after this micro-batch updates parameters. The one place that decides it."""
        if self._forced_boundary is not None:
            return self._forced_boundary
        return self._window + 1 >= self._batch.accumulation

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Decide the boundary from outside until called again; None returns to counting.

        Meanwhile `step` may be called at boundaries only, and every step is averaged over the configured accumulation.
        """
        self._forced_boundary = is_boundary
        self._arm()

    def _arm(self, micro_batches: int | None = None) -> None:
        """Tell the runtime whether the next backward reduces, and what makes its sum a mean."""
        each_time = self._plan.layout.stage.grad is Placement.SHARDED
        self._runtime.reducing = self._syncing and (each_time or self.is_gradient_accumulation_boundary())
        ranks = self._mesh.data.size if self._config.gradient_allreduce_op == "mean" else 1
        self._runtime.mean_factor = 1.0 / (ranks * self._averaged_over(micro_batches))

    def _averaged_over(self, micro_batches: int | None = None) -> int:
        return (micro_batches or self._batch.accumulation) if self._divide else 1

    # --- the step ---------------------------------------------------------------------------------------------------

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> StepResult | None:
        """End a micro-batch. At the accumulation boundary: reduce what is left, clip, check, update, gather, clear,
        move the schedule, and return what was done; None before it. `lr_kwargs` go to the scheduler."""
        self._refuse_by_hand("engine.step")
        self._check_can_step()
        if not self.is_gradient_accumulation_boundary():
            self._finish_micro_batch()
            return None
        self._check_metric(lr_kwargs)
        # Who decides the boundary from outside may not have called `step` before it, so counting says nothing then.
        count = self._window + 1 if self._forced_boundary is None else self._batch.accumulation
        self._reduce(count)
        return self._update(count, lr_kwargs=lr_kwargs)

    def _check_can_step(self) -> None:
        self._check_alive()
        self._require_here()
        if self._plan.optimizer is None:
            raise UsageError(
                "this engine has no optimizer: give one to sheer.initialize, or set `optimizer` in its config"
            )
        if not self._syncing:
            raise UsageError("step inside no_sync: leave the context before stepping")

    def _check_metric(self, lr_kwargs: Mapping[str, Any] | None) -> None:
        """torch's one scheduler that cannot step by itself: find out before the update, not after."""
        if isinstance(self.lr_scheduler, ReduceLROnPlateau) and "metrics" not in (lr_kwargs or {}):
            raise UsageError(
                "the scheduler is a ReduceLROnPlateau, which needs a metric at every step: "
                'engine.step(lr_kwargs={"metrics": value}). With train_batch, step it yourself and leave it out of '
                "sheer.initialize"
            )

    def _finish_micro_batch(self) -> None:
        self._check_finished()
        self._check_scaled()
        self._applied = False
        self.counters.micro_steps += 1
        self._window += 1
        if self._runtime.reducing and not self._runtime.reduced:
            self._runtime.finish()
        self._arm()

    def _reduce(self, micro_batches: int) -> None:
        """REDUCE: gradients where the optimizer wants them, averaged over ranks and micro-batches."""
        self._check_finished()
        self._check_scaled()
        self._arm(micro_batches)
        self._runtime.complete()

    def _check_finished(self) -> None:
        if self._runtime.running:
            self._abandon("the last backward did not finish")
            raise UsageError(
                "step after a backward that failed: its gradients are forgotten; run the step's forwards again"
            )

    def _check_scaled(self) -> None:
        """Refuse gradients of this micro-batch that would be divided by a loss scale they were never given."""
        if self._scale is not None and self._runtime.by_user and not self._scaled:
            raise UsageError(
                "fp16 gradients without the loss scale: use engine.backward(loss), or engine.scale(loss).backward(). "
                "engine.zero_grad() forgets them"
            )
        self._runtime.by_user = self._scaled = False

    def _update(self, micro_batches: int, *, lr_kwargs: Mapping[str, Any] | None = None) -> StepResult:
        """STEP: everything after the reduction. Stays on the device unless something must be decided on the host."""
        optimizer = self._plan.optimizer
        assert optimizer is not None
        adopted = self._runtime.adopt()
        if adopted:
            self._teller.warn_once(
                "adopted",
                f"the data of {len(adopted)} parameters ({adopted[0]!r}, ...) was replaced; values taken over",
            )
        scale = 1.0 if self._scale is None else self._scale.scale
        saved = self._background.done if self._background.running else None
        stats = statistics.gather(self._runtime, self._plan.census, self._losses, micro_batches, over=saved)
        self._require_gradients(stats.unused)
        others = replaced(self.module, self._params, among=sorted(stats.unused))
        if others:
            self._teller.warn_once(
                "replaced",
                f"{len(others)} parameters ({others[0]!r}, ...) are other Parameter objects than when the engine was "
                "built, and do not train: copy values in place, or destroy the engine and build another",
            )
        norm = stats.square_sum.sqrt() / scale
        lrs = tuple(float(group["lr"]) for group in optimizer.base.param_groups)
        skipped = self._checks_finite and not math.isfinite(norm.item())
        if skipped:
            self._report_overflow()
        else:
            self._apply(optimizer, norm, scale, stats.unused)
        samples = self._batch.micro * self._mesh.data.size * micro_batches
        fresh = micro_batches - self._window
        result = StepResult(
            step=self.counters.advance(skipped=skipped, samples=samples, micro_batches=fresh),
            lr=lrs,
            skipped=skipped,
            loss_scale=scale,
            micro_batches=micro_batches,
            norm_tensor=norm,
            loss_tensor=stats.mean_loss,
        )
        self._end_step(result)
        if self._scale is not None:  # raises where the scale cannot fall further; the step is over then
            self._scale.update(skipped)
        if not skipped and self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        if stats.over:  # raises where the save failed, in the same step on every rank; the step is over then
            self._end_save()
        return result

    def _require_gradients(self, unused: frozenset[str]) -> None:
        """Every rank knows what no rank used, so all refuse together a step that would only move the counters."""
        if len(unused) == len(self._plan.census.names):
            self._forget()
            raise UsageError(
                "step without gradients: no parameter has one on any rank. Call engine.backward(loss) before step, and "
                "let the loss depend on parameters that require grad and are in an optimizer group (those that the "
                "module had when the engine was built: one that is assigned anew does not train)."
            )

    @property
    def _checks_finite(self) -> bool:
        return self._scale is not None or (self._config.bf16.enabled and self._config.bf16.check_grad_overflow)

    def _apply(self, optimizer: FlatOptimizer, norm: torch.Tensor, scale: float, unused: frozenset[str]) -> None:
        runtime = self._runtime
        self._background.settle()
        optimizer.update(
            [grad.owned() for grad in runtime.grads],
            factor=self._gradient_factor(norm, scale),
            unused=unused,
            first=runtime.absorb,
            then=runtime.publish,
        )
        runtime.published()

    def _gradient_factor(self, norm: torch.Tensor, scale: float) -> torch.Tensor | None:
        """What clipping and the loss scale make of the gradient, as one factor; None where that is 1."""
        limit = self._config.gradient_clipping
        if limit > 0:
            return torch.clamp(limit / (norm + 1e-6), max=1.0) / scale
        return None if scale == 1.0 else torch.full_like(norm, 1.0 / scale)

    def _report_overflow(self) -> None:
        first = statistics.first_not_finite(self._runtime)
        what = "the norm of the gradient" if first is None else f"the gradient of {first!r}"
        at = "" if self._scale is None else f" at loss scale {self._scale.scale:g}"
        self._teller.warn(f"step {self.counters.global_steps + 1} skipped: {what} is not finite{at}")

    def _end_step(self, result: StepResult) -> None:
        self._forget()
        self._applied = not result.skipped
        if self._pipeline is None and self._frozen_changed():
            self._replan()
        if self.optimizer is not None:
            self.optimizer.note_step(skipped=result.skipped)
        self.last_step = result
        self._tell(result)

    def _tell(self, result: StepResult) -> None:
        self._compiler.review()
        report = self._compiler.report
        if (report.breaks or report.fallbacks) and not self._trouble_told:
            self._trouble_told = True
            self._teller.warn(str(report))
        every = self._config.steps_per_print
        if every and result.step % every == 0 and not result.skipped:
            self._teller.info(str(result))
        for monitor in self._monitors:
            monitor.write(result.step, result.values())

    def _abandon(self, why: str) -> None:
        """Forget the gradients of the step in progress, having done what other ranks wait for."""
        forgotten = self._window
        self._runtime.abort()
        self._forget()
        self._teller.warn(
            f"{why}: the gradients of this step ({forgotten} finished micro-batches before it) are forgotten; "
            "the next micro-batch starts a new step"
        )

    def _forget(self) -> None:
        """No micro-batch of the coming step has been done."""
        self._runtime.clear()
        self._losses, self._window = [], 0
        self._divide, self._scaled = True, False
        self._arm()

    def zero_grad(self) -> None:
        """Forget the gradients accumulated in this step so far: `.grad` becomes None everywhere, and the next
        micro-batch is the first of its step."""
        self._check_alive()
        if self._runtime.running or self._window:
            self._abandon("zero_grad in the middle of a step")
        self._forget()
        for param in self._params.values():
            param.grad = None

    # --- between steps ----------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> None:
        """Put the module into training mode."""
        self.module.train(mode)

    def eval(self) -> None:
        """Put the module into evaluation mode."""
        self.module.eval()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples per step by changing the accumulation; from the next step on."""
        per_micro_batch = self._batch.micro * self._mesh.data.size
        if train_batch_size < per_micro_batch or train_batch_size % per_micro_batch:
            raise UsageError(
                f"set_train_batch_size({train_batch_size}): not a multiple of micro-batch {self._batch.micro} x "
                f"{self._mesh.data.size} ranks = {per_micro_batch}"
            )
        self._require_between_steps("set_train_batch_size")
        self._batch = BatchSizes(train_batch_size, self._batch.micro, train_batch_size // per_micro_batch)
        self._arm()

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples per forward, keeping the accumulation; the loader is the caller's to change."""
        if micro_batch_size < 1:
            raise UsageError(f"set_train_micro_batch_size({micro_batch_size}): at least 1 is needed")
        self._require_between_steps("set_train_micro_batch_size")
        accumulation = self._batch.accumulation
        train = micro_batch_size * accumulation * self._mesh.data.size
        self._batch = BatchSizes(train, micro_batch_size, accumulation)
        self._arm()

    def _require_between_steps(self, what: str) -> None:
        self._check_alive()
        if self._window or self._runtime.dirty:
            raise UsageError(
                f"{what} in the middle of a step ({self._window} of {self._batch.accumulation} micro-batches done): "
                "call it after engine.step() returned a result, or engine.flush() / engine.zero_grad() first"
            )

    def flat_optimizer(self) -> FlatOptimizer:
        """What updates this rank's shards; for `sheer.utils`."""
        self._check_alive()
        if self._plan.optimizer is None:
            raise UsageError("this engine has no optimizer")
        self._background.settle()
        return self._plan.optimizer

    def reduce_now(self, *, to_write: bool = False) -> bool:
        """Reduce this step's gradients before `step`, so that they can be read or changed. Collective.

        False where no rank has any; nothing is done then, unless it is `to_write` them.
        """
        self._require_here()
        there = any(self._mesh.data.gather_objects(self._runtime.dirty))
        if there or to_write:
            self._reduce(self._window + 1)
        return there

    # --- end --------------------------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Give the module its parameters back as tensors of their own, free all buffers, stop compiling. Idempotent.

        Waits for a save beside training, and raises in the end where that failed. Collective at stage 3, where values
        come from all ranks: CommError where one is gone; all else is done then.
        """
        if not self._alive:
            return
        self.reload_states()
        self._background.settle()
        self._alive = False
        self._compiler.disable()
        for fqn in self._runtime.gates:
            self._compiler.set_gate(fqn, None)
        try:
            self._runtime.destroy()
        finally:
            if self._plan.optimizer is not None:
                self._plan.optimizer.release()
                self._plan = self._plan._replace(optimizer=None)
            for monitor in self._monitors:
                monitor.close()
            if self._pipeline is not None:
                self._pipeline.close()
            self._losses, self._own_iterator, self._monitors, self._pipeline = [], None, (), None
            error = self._background.end()
            self._leave()
            if error is not None:
                raise error

    def _check_alive(self, *, torn: bool = False) -> None:
        if not self._alive:
            raise UsageError("this engine was destroyed; build another with sheer.initialize")
        if self._torn and not torn:
            raise UsageError("a load of this engine failed half-way, so its values are mixed; load a checkpoint first")

    def __getattr__(self, name: str) -> Any:
        """What the engine lacks is the module's (`engine.generate`, `engine.my_flag`)."""
        if name.startswith("__") or "module" not in self.__dict__:
            raise AttributeError(f"Engine has no attribute {name!r}")
        try:
            return getattr(self.module, name)
        except AttributeError:
            raise AttributeError(
                f"neither the engine nor its module ({type(self.module).__name__}) has an attribute {name!r}"
                f"{instead_of(name)}"
            ) from None


def _weak(method: Callable[..., Any]) -> Callable[[], Any]:
    """`method`, without keeping its object alive."""
    reference = weakref.WeakMethod(method)

    def call() -> Any:
        live = reference()
        if live is None:
            raise UsageError("the engine of this optimizer no longer exists")
        return live()

    return call
