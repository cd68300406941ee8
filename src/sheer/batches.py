"""An engine's verbs for whole steps: micro-batches from an iterator, accumulated here or passed through stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from sheer import feeding
from sheer.errors import UsageError
from sheer.layout import Placement
from sheer.pipeline import PipelineParallelGrid
from sheer.pipelining import Desk, Pipeline
from sheer.schedule import Kind, accumulate

if TYPE_CHECKING:
    from sheer.comm import Mesh
    from sheer.config import BatchSizes
    from sheer.data import ResumableLoader
    from sheer.observe import StepResult
    from sheer.planning import Plan
    from sheer.zero import ZeroRuntime


class BatchVerbs(ABC):
    """Trains and evaluates on what iterators give. A base of `Engine` only."""

    training_dataloader: ResumableLoader | None
    _pipeline: Pipeline | None
    _own_iterator: Iterator[Any] | None
    _mesh: Mesh
    _batch: BatchSizes
    _plan: Plan
    _runtime: ZeroRuntime
    _window: int
    _losses: list[torch.Tensor]
    last_step: StepResult | None
    module: torch.nn.Module

    # --- training ---

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Take the micro-batches of one step from `data_iter` and train on them; the mean loss over all of them and
        all ranks, a 0-d tensor. `engine.last_step` has the rest. Collective on all ranks.

        A tuple is passed as positional arguments, a mapping as keywords, anything else as the one argument. With a
        `PipelineModule` a micro-batch is a pair (inputs, label); the stages in between may pass None.
        StopIteration when the iterator ends; micro-batches it gave before that stay (`flush` trains on them). Where
        the module is a pipeline all ranks agree on that; else all must have as many.
        """
        self._check_can_step()
        self._check_metric(None)
        if torch.is_inference_mode_enabled():
            raise UsageError(
                "train_batch inside torch.inference_mode(), where nothing can be trained; leave it first "
                "(eval_batch may be called there)"
            )
        count = self._accumulate(data_iter) if self._pipeline is None else self._pass_through(self._pipeline, data_iter)
        self._reduce(count)
        loss = self._update(count).loss_tensor
        assert loss is not None
        return loss

    def _accumulate(self, data_iter: Iterator[Any] | None) -> int:
        batches, count = self._batches(data_iter), self._batch.accumulation
        output: Any = None
        for action in accumulate(count, first=self._window):
            if action.kind is Kind.FORWARD:
                output = feeding.call(self, feeding.next_batch(batches, done=self._window, of=count))
            elif action.kind is Kind.BACKWARD:
                self.backward(feeding.loss_of(output))
                output = None
                if action.micro_batch + 1 < count:
                    self._finish_micro_batch()
        return count

    def _pass_through(self, pipeline: Pipeline, data_iter: Iterator[Any] | None) -> int:
        self._require_between_steps("train_batch")
        count = self._batch.accumulation
        start = pipeline.start(lambda: self._batches(data_iter), micro_batches=count, changed=self._plan_changed())
        return self._run_stages(pipeline, count, replan=start.replan)

    def _run_stages(self, pipeline: Pipeline, count: int, *, replan: bool) -> int:
        if replan:
            self._replan()
        self._arm(count)
        try:
            losses = pipeline.train(self._desk(), count)
        except BaseException:
            self._abandon("a pipeline step failed")
            raise
        self._losses.extend(losses)
        return count

    def _desk(self) -> Desk:
        return Desk(
            runtime=self._runtime,
            autocast=self._autocast,
            to_device=self._to_device,
            scale=self._times_scale,
            reduces_each=self._plan.layout.stage.grad is Placement.SHARDED,
        )

    def _batches(self, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        if data_iter is not None:
            return feeding.checked(data_iter)
        if self._own_iterator is None:
            self._own_iterator = feeding.endless(self.training_dataloader)
        return self._own_iterator

    def flush(self, lr_kwargs: Mapping[str, Any] | None = None) -> StepResult | None:
        """Apply the micro-batches accumulated since the last update as a step of their own (an epoch's leftovers),
        averaged over as many as they are; None where there are none. Collective on all ranks."""
        self._check_can_step()
        count = self._window
        if self._pipeline is not None and not count:
            rest = self._pipeline.rest(changed=self._plan_changed())
            count = rest.micro_batches and self._run_stages(self._pipeline, rest.micro_batches, replan=rest.replan)
        if count == 0:
            return None
        self._check_metric(lr_kwargs)
        self._reduce(count)
        return self._update(count, lr_kwargs=lr_kwargs)

    # --- evaluation ---

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Run the stages forward, in evaluation mode and without gradients, on as many micro-batches as a step has (or
        `num_micro_batches`), or on fewer where the data ends. Collective on all ranks.

        Returns on every rank the loss, fp32: the mean over micro-batches and ranks, 0-d; with `reduce_output=None`
        that of each micro-batch, 1-d. With `return_logits`, (loss, logits); with `compute_loss=False`, logits, and no
        labels are needed. Logits are what the last layer returned for this data rank's samples, floating ones in fp32:
        micro-batches one after the other in one tensor where they fit, else a list of them. StopIteration on every
        rank where there is no data.
        """
        self._check_alive()
        self._require_here(evaluating=True)
        if self._pipeline is None:
            raise UsageError("eval_batch runs a PipelineModule; call engine(...) under torch.no_grad() with any other")
        if reduce_output not in ("avg", None):
            raise UsageError(f"eval_batch: reduce_output is {reduce_output!r}; it is 'avg' or None")
        if num_micro_batches is not None and (type(num_micro_batches) is not int or num_micro_batches < 1):
            raise UsageError(f"eval_batch: num_micro_batches is {num_micro_batches!r}; it is a number of at least 1")
        wants_logits = return_logits or not compute_loss
        with _evaluating(self.module):
            found = self._pipeline.evaluate(
                self._desk(),
                lambda: self._batches(data_iter),
                micro_batches=num_micro_batches or self._batch.accumulation,
                loss=compute_loss,
                outputs=wants_logits,
            )
        if found.losses is None:
            return found.outputs
        loss = found.losses if reduce_output is None else found.losses.mean()
        return (loss, found.outputs) if return_logits else loss

    def inference_batch(self, data_iter: Iterator[Any] | None, num_micro_batches: int | None = None) -> Any:
        """What the last layer returns, on every rank; see `eval_batch`. No labels are needed."""
        return self.eval_batch(data_iter, compute_loss=False, num_micro_batches=num_micro_batches)

    # --- under DeepSpeed's names for a pipeline's engine ---

    @property
    def grid(self) -> PipelineParallelGrid:
        """Where this rank stands. Of a `PipelineModule` only."""
        if self._pipeline is None:  # a module may have a `grid` of its own
            raise AttributeError("grid")
        return PipelineParallelGrid(self._mesh)

    @property
    def mpu(self) -> PipelineParallelGrid | None:
        """The same, which answers as Megatron's `mpu` does; None for any other module."""
        return None if self._pipeline is None else self.grid

    @property
    def stage_id(self) -> int:
        """This rank's pipeline stage."""
        return self._mesh.stage

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self._batch.accumulation

    @property
    def micro_batch_size(self) -> int:
        """Samples of a micro-batch on one data rank."""
        return self._batch.micro

    @property
    def is_pipe_parallel(self) -> bool:
        """Whether there are several stages."""
        return self._mesh.stages > 1

    @property
    def is_data_parallel(self) -> bool:
        """Whether several ranks share a stage."""
        return self._mesh.data.size > 1

    @property
    def is_model_parallel(self) -> bool:
        """False: there is no tensor parallelism."""
        return False

    @property
    def agg_train_loss(self) -> torch.Tensor | None:
        """The mean loss of the last step, over micro-batches and data ranks, on every rank; None before the first."""
        return None if self.last_step is None else self.last_step.loss_tensor

    @property
    def total_loss(self) -> torch.Tensor | None:
        """The loss of the last step summed over its micro-batches, the mean over data ranks, on every rank."""
        step = self.last_step
        return None if step is None or step.loss_tensor is None else step.loss_tensor * step.micro_batches

    # --- where micro-batches come from ---

    def set_dataloader(self, loader: Any) -> None:
        """Let `train_batch()` without an iterator go through `loader` (of `deepspeed_io`), epoch after epoch. From now
        on checkpoints hold its position."""
        self.training_dataloader = loader
        self._own_iterator = None

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Let `train_batch()` without an iterator take from `iterator`."""
        self._own_iterator = feeding.checked(iterator)

    def set_batch_fn(self, fn: Callable[[Any], Any] | None) -> None:
        """Let `fn` make the pair (inputs, label) of what an iterator gives to a pipeline."""
        self._require_pipeline("set_batch_fn").batch_fn = fn

    def _require_pipeline(self, verb: str) -> Pipeline:
        if self._pipeline is None:
            raise UsageError(f"{verb} concerns a PipelineModule; this engine trains a {type(self.module).__name__}")
        return self._pipeline

    def _refuse_by_hand(self, verb: str) -> None:
        """Micro-batches of several stages overlap, so nobody can run them one by one."""
        if self._mesh.stages > 1:
            raise UsageError(
                f"{verb}: with {self._mesh.stages} pipeline stages use engine.train_batch(data_iter) or "
                "engine.eval_batch(data_iter)"
            )

    # --- the engine's ---

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Accumulate the gradients of `loss`."""

    @abstractmethod
    def _check_alive(self) -> None: ...

    @abstractmethod
    def _check_can_step(self) -> None: ...

    @abstractmethod
    def _require_here(self, *, evaluating: bool = False) -> None: ...

    @abstractmethod
    def _check_metric(self, lr_kwargs: Mapping[str, Any] | None) -> None: ...

    @abstractmethod
    def _require_between_steps(self, what: str) -> None: ...

    @abstractmethod
    def _plan_changed(self) -> bool: ...

    @abstractmethod
    def _replan(self) -> None: ...

    @abstractmethod
    def _abandon(self, why: str) -> None: ...

    @abstractmethod
    def _arm(self, micro_batches: int | None = None) -> None: ...

    @abstractmethod
    def _finish_micro_batch(self) -> None: ...

    @abstractmethod
    def _reduce(self, micro_batches: int) -> None: ...

    @abstractmethod
    def _update(self, micro_batches: int, *, lr_kwargs: Mapping[str, Any] | None = None) -> StepResult: ...

    @abstractmethod
    def _autocast(self) -> AbstractContextManager[Any]: ...

    @abstractmethod
    def _to_device(self, batch: Any) -> Any: ...

    @abstractmethod
    def _times_scale(self, loss: torch.Tensor) -> torch.Tensor: ...


@contextmanager
def _evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode, and afterwards each submodule's own mode again."""
    modes = [(one, one.training) for one in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for one, training in modes:
            one.training = training
