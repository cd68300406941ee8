"""The pipeline under an engine: getting the data to its stages, running a schedule over them, evaluating."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree

from sheer import errors, feeding
from sheer import schedule as schedules
from sheer.comm import Axis, Mesh, build_links
from sheer.errors import DataError, UsageError, did_you_mean
from sheer.observe import Teller
from sheer.pipeline import PipelineModule
from sheer.pipeline.mail import routes
from sheer.pipeline.runner import Runner
from sheer.pipeline.structure import Blueprint, pack
from sheer.schedule import Action, Kind, Schedule
from sheer.zero import Pass, Phase, ZeroRuntime, runs_twice


class Desk(NamedTuple):
    """What of an engine a step works with."""

    runtime: ZeroRuntime
    autocast: Callable[[], AbstractContextManager[Any]]
    to_device: Callable[[Any], Any]
    scale: Callable[[torch.Tensor], torch.Tensor]
    reduces_each: bool
    """Whether every backward reduces (gradients are sharded), or the last one of a step."""


class _Leg(NamedTuple):
    """What the engine does around one action of this stage."""

    action: Action
    what: Pass
    reduces: bool = False
    """Whether the gradients of the chunk are reduced with it."""
    shared: bool = False
    """Whether those of parameters that are not one chunk's are too."""


class Start(NamedTuple):
    """What all ranks know before a step."""

    micro_batches: int
    """As many as every rank has."""
    replan: bool
    """Whether some rank's parameters were frozen or unfrozen."""


class Evaluation(NamedTuple):
    """What the forwards of all micro-batches gave."""

    losses: torch.Tensor | None
    """[micro-batches], fp32, the mean over the data axis; None where they were not asked for."""
    outputs: Any
    """Of this data rank's samples, floating ones in fp32: one structure, or a list of one for each micro-batch."""


class Pipeline:
    """Runs the stages of `module`. All ranks build it and make the same calls."""

    def __init__(
        self,
        module: PipelineModule,
        *,
        asked: str | None,
        schedule: Schedule,
        mesh: Mesh,
        device: torch.device,
        teller: Teller,
    ) -> None:
        """`schedule` is that of a whole step, as `find_schedule` made it of what was `asked` for."""
        self.module = module
        self.batch_fn: Callable[[Any], Any] | None = None
        """What makes a pair (inputs, label) of what an iterator gives; None leaves it to the module."""
        self._asked = asked
        self._whole = schedule
        self._mesh = mesh
        self._device = device
        self._teller = teller
        self._runners: dict[tuple[int, bool, bool], Runner] = {}
        self._links = build_links(mesh.pipe, routes(schedule), everyone=mesh.world)
        self._left: list[Any] = []  # micro-batches that were taken and not trained on
        self._failure: Exception | None = None  # what this rank's data raised, until all ranks know
        self._desk: Desk | None = None  # set while a step runs
        self._legs: deque[_Leg] = deque()  # of this step, as other data ranks expect them of this one

    def close(self) -> None:
        """Leave the links. All ranks do."""
        self._links.close()
        self._runners = {}

    def schedule(self, micro_batches: int) -> Schedule:
        """The schedule of a training step of so many micro-batches; one that was written for more is shortened."""
        written = self._asked is not None and self._asked not in schedules.GENERATORS
        if written and micro_batches < self._whole.micro_batches:
            self._teller.info(
                f"pipeline.schedule is for {self._whole.micro_batches} micro-batches; for {micro_batches} it is run "
                "without the others"
            )
            return schedules.shorten(self._whole, micro_batches)
        return find_schedule(self._asked, self.module, micro_batches)

    # --- data ---------------------------------------------------------------------------------------------------------

    @property
    def _takes_data(self) -> bool:
        return self.module.is_first or self.module.is_last

    def start(self, batches: Callable[[], Iterator[Any]], *, micro_batches: int, changed: bool) -> Start:
        """Take the micro-batches of a step, on the stages that need them, and agree. Collective on all ranks.

        Raises on every rank: StopIteration where some rank has too few (what all have waits for the next step or a
        flush), and what any rank's data raised.
        """
        word = self._take(batches, micro_batches)
        if changed:
            word = {**word, "replan": True}
        told = self._share(word)
        self._raise_failed(told)
        short = [one["left"] for one in told if "left" in one]
        if short:
            self._left = self._left[: min(short)]
            raise StopIteration(
                f"the data ended with {min(short)} of {micro_batches} micro-batches of a step taken"
                + ("; engine.flush() trains on them" if min(short) else "")
            )
        return Start(micro_batches, any(one.get("replan") for one in told))

    def rest(self, *, changed: bool) -> Start:
        """Agree on the micro-batches that an ended iterator left. Collective on all ranks."""
        word = {"left": len(self._left)} if self._takes_data else {"replan": changed}
        told = self._share({**word, "replan": changed})
        count = min(one["left"] for one in told if "left" in one)
        self._left = self._left[:count]
        return Start(count, any(one["replan"] for one in told))

    def forget(self) -> None:
        """Micro-batches that wait belong to data that is not gone on with."""
        self._left = []

    def _take(self, batches: Callable[[], Iterator[Any]], count: int) -> dict[str, Any]:
        """Fill `_left`; {} where that went well."""
        if not self._takes_data:
            return {}
        try:
            source = batches()
            while len(self._left) < count:
                self._left.append(self._pair(next(source)))
        except StopIteration:
            return {"left": len(self._left)}
        except Exception as error:
            self._failure = error
            kind = type(error).__name__
            return {"error": kind, "message": f"rank {self._mesh.world.rank}: {kind}: {error}"}
        return {}

    def _raise_failed(self, told: Sequence[dict[str, Any]]) -> None:
        """Raise on every rank what the data of any raised. What was taken belongs to no step then: ranks have taken
        unequally much, so inputs and labels would no longer fit each other."""
        failed = [one for one in told if "error" in one]
        if not failed:
            return
        own, self._failure, self._left = self._failure, None, []
        known: type[Exception] = getattr(errors, failed[0]["error"], DataError)
        raise known("the data of a step: " + "; ".join(one["message"] for one in failed)) from own

    def _pair(self, batch: Any) -> Any:
        return self.module.split_batch(batch if self.batch_fn is None else self.batch_fn(batch))

    def _share(self, word: dict[str, Any]) -> list[dict[str, Any]]:
        """What each rank says; one number on the wire when none says anything."""
        return [json.loads(text) for text in self._links.failures(json.dumps(word) if word else None)]

    # --- a step -------------------------------------------------------------------------------------------------------

    def train(self, desk: Desk, micro_batches: int) -> Sequence[torch.Tensor]:
        """All forwards and backwards of a step; the losses, on the last stage.

        When a stage raises, every rank does, and none waits for another.
        """
        taken, self._left = self._left[:micro_batches], self._left[micro_batches:]
        runner = self._runner(micro_batches, trains=True, loss=True)
        with self._at(desk, runner.schedule):
            return runner.step(*self._fed(taken, desk)).losses

    def evaluate(
        self, desk: Desk, batches: Callable[[], Iterator[Any]], *, micro_batches: int, loss: bool, outputs: bool
    ) -> Evaluation:
        """Forwards alone, of as many micro-batches as every rank has; what they gave, on every rank.

        StopIteration on all ranks where that is none.
        """
        waiting, self._left = self._left, []
        try:
            told = self._share(self._take(batches, micro_batches))
            self._raise_failed(told)
            count = min([one["left"] for one in told if "left" in one], default=micro_batches)
            taken = self._left[:count]
        finally:
            self._left = waiting
        if not count:
            raise StopIteration("the data has ended")
        runner = self._runner(count, trains=False, loss=loss)
        with self._at(desk, runner.schedule), torch.no_grad():
            outcome = runner.step(*self._fed(taken, desk), keep_outputs=outputs)
        return Evaluation(
            self._losses_everywhere(desk, outcome.losses, count) if loss else None,
            outputs_everywhere(outcome.outputs, self._mesh.pipe, source=self.module.placement[-1], device=self._device)
            if outputs
            else None,
        )

    def _losses_everywhere(self, desk: Desk, losses: Sequence[torch.Tensor], count: int) -> torch.Tensor:
        summed = torch.zeros(count, device=self._device)
        if losses:
            summed += torch.stack([loss.float().reshape(()) for loss in losses])
        desk.runtime.world_lane.all_reduce(summed, what="the losses of an evaluation").wait()
        return summed / self._mesh.data.size

    def _fed(self, taken: Sequence[Any], desk: Desk) -> tuple[Sequence[Any] | None, Sequence[Any] | None]:
        """Inputs on the first stage, labels on the last; on the device when they are looked at."""
        inputs = _Moved([pair.inputs for pair in taken], desk.to_device) if self.module.is_first else None
        labels = _Moved([pair.label for pair in taken], desk.to_device) if self.module.is_last else None
        return inputs, labels

    @contextmanager
    def _at(self, desk: Desk, schedule: Schedule) -> Iterator[None]:
        self._desk = desk
        self._legs = deque(_legs(schedule.actions[self.module.stage], reduces_each=desk.reduces_each))
        try:
            yield
        finally:
            self._desk = None
            desk.runtime.gathering.turn(None)

    def _runner(self, micro_batches: int, *, trains: bool, loss: bool) -> Runner:
        key = (micro_batches, trains, loss)
        if key not in self._runners:
            module = self.module
            plan = (
                self.schedule(micro_batches)
                if trains
                else schedules.forward_only(module.num_stages, micro_batches, placement=module.placement)
            )
            self._runners[key] = Runner(
                plan,
                stage=module.stage,
                run=self._run,
                loss=self._loss if loss else None,
                links=self._links,
                device=self._device,
                around=self._around,
                cheap=runs_twice,
                scale=self._scale,
                tell=lambda text: self._teller.warn_once(text, text),
                on_failure=self._keep_company,
            )
        return self._runners[key]

    # --- what the runner calls ----------------------------------------------------------------------------------------

    def _run(self, carry: Any, *, chunk: int) -> Any:
        assert self._desk is not None
        with self._desk.autocast():
            return self.module.run(carry, chunk=chunk)

    def _loss(self, output: Any, label: Any) -> Any:
        assert self._desk is not None
        with self._desk.autocast():
            if self.module.loss_fn is None:
                return feeding.loss_of(output)
            return self.module.loss_fn(output, label)

    def _scale(self, loss: torch.Tensor) -> torch.Tensor:
        assert self._desk is not None
        return self._desk.scale(loss)

    @contextmanager
    def _around(self, action: Action) -> Iterator[None]:
        assert self._desk is not None
        leg = self._legs[0]
        assert leg.action == action
        runtime = self._desk.runtime
        if runtime.layout.shards_params:
            runtime.gathering.turn(leg.what, following=self._legs[1].what if len(self._legs) > 1 else None)
        if leg.what.phase is Phase.FORWARD and not runtime.layout.shards_params:
            yield
        elif leg.what.phase is Phase.FORWARD:
            runtime.gathering.begin_pipelined()
            with runtime.gathering.watched():
                yield
            runtime.gathering.end_forward()
        else:
            runtime.reducing = leg.reduces
            with runtime.backward(chunk=leg.what.chunk, shared=leg.shared):
                yield
        self._legs.popleft()

    def _keep_company(self) -> None:
        """The step has failed here: gather and reduce with the other data ranks what they expect, whatever it is."""
        if self._desk is None:
            return
        runtime = self._desk.runtime
        if runtime.running:
            runtime.gathering.abort_backward()
            runtime.finish()
            self._legs.popleft()
        elif runtime.gathering.within_forward:
            runtime.gathering.abort_forward()
            self._legs.popleft()
        while self._legs:
            with self._around(self._legs[0].action):
                pass


def _legs(actions: Sequence[Action], *, reduces_each: bool) -> Iterator[_Leg]:
    """What the engine does around the actions of a stage. Gradients of a chunk are reduced with each of its backwards
    or with the last one; those that several chunks share, with each or with the last of all."""
    ends = {action.chunk: place for place, action in enumerate(actions) if action.kind in _BRINGS_WEIGHTS}
    for place, action in enumerate(actions):
        if action.kind in _PHASES:
            reduces = action.kind in _BRINGS_WEIGHTS and (reduces_each or ends[action.chunk] == place)
            shared = reduces and (reduces_each or max(ends.values()) == place)
            yield _Leg(action, Pass(_PHASES[action.kind], action.chunk), reduces, shared)


_PHASES = {
    Kind.FORWARD: Phase.FORWARD,
    Kind.BACKWARD: Phase.BACKWARD,
    Kind.INPUT: Phase.INPUTS,
    Kind.WEIGHT: Phase.WEIGHTS,
}
_BRINGS_WEIGHTS = (Kind.BACKWARD, Kind.WEIGHT)


class _Moved(Sequence[Any]):
    """Batches that go to the device when they are looked at."""

    def __init__(self, batches: list[Any], to_device: Callable[[Any], Any]) -> None:
        self._batches = batches
        self._to_device = to_device

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        return self._to_device(self._batches[index])


def find_schedule(asked: str | None, module: PipelineModule, micro_batches: int) -> Schedule:
    """The schedule called `asked`, or in the file `asked`, or written in it, for this module.

    Raises UsageError where it does not fit the module.
    """
    if asked is None:
        asked = _default(module)
    if asked in schedules.GENERATORS:
        found = schedules.by_name(asked, module.num_stages, micro_batches, chunks=module.chunks)
    else:
        found = schedules.validate(schedules.parse(_text(asked)))
    mine, theirs = (module.num_stages, module.placement), (found.stages, found.placement)
    if mine != theirs:
        raise UsageError(
            f"pipeline.schedule {asked[:60]!r} places virtual stages on stages {list(theirs[1])}, the module on "
            f"{list(mine[1])}; build the PipelineModule with num_stages={theirs[0]}, placement={list(theirs[1])}"
        )
    if found.micro_batches != micro_batches:
        raise UsageError(
            f"pipeline.schedule {asked[:60]!r} is for {found.micro_batches} micro-batches, this step has "
            f"{micro_batches}; set gradient_accumulation_steps to {found.micro_batches}"
        )
    if not any(action.kind in (Kind.BACKWARD, Kind.INPUT) for action in found.actions[module.stage]):
        raise UsageError(
            f"pipeline.schedule {asked[:60]!r} has no backwards, so it trains nothing; eval_batch needs none"
        )
    return found


def _default(module: PipelineModule) -> str:
    if module.chunks == 1:
        return "1f1b"
    there_and_back = (*range(module.num_stages), *reversed(range(module.num_stages)))
    return "zb-v" if module.placement == there_and_back and module.num_stages > 1 else "interleaved"


def _text(asked: str) -> str:
    """`asked` itself where it is a schedule, as every one has a colon; else what the file of that name says."""
    if ":" in asked:
        return asked
    try:
        return Path(asked).read_text()
    except OSError as error:
        names = [name for name in schedules.GENERATORS if name != "forward-only"]
        raise UsageError(
            f"pipeline.schedule={asked!r} is neither a name ({', '.join(names)}) nor a file that can be read: {error}."
            f"{did_you_mean(asked.lower(), names)}"
        ) from error


def outputs_everywhere(outputs: Sequence[Any], pipe: Axis, *, source: int, device: torch.device) -> Any:
    """The outputs of all micro-batches, which stage `source` has, on every stage. Collective on `pipe`.

    Raises on every stage where they hold what cannot travel between stages.
    """
    mine = pipe.together(
        lambda: [pack(one, what=f"the output of micro-batch {number}") for number, one in enumerate(outputs)],
        doing="eval_batch: handing out what the last layer returned",
    )
    told = pipe.gather_objects([packed.blueprint.to_bytes() for packed in mine])[source]
    blueprints = [Blueprint.from_bytes(description) for description in told]
    found = []
    for number, blueprint in enumerate(blueprints):
        if pipe.rank == source:
            tensors = [_wide(tensor) for tensor in mine[number].tensors]
        else:
            tensors = [torch.empty(one.shape, dtype=_wide_dtype(one.dtype), device=device) for one in blueprint.tensors]
        for tensor in tensors:
            pipe.broadcast(tensor, source=source)
        found.append(blueprint.build(tensors))
    return _joined(found)


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point else dtype


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(_wide_dtype(tensor.dtype)).contiguous()


def _joined(outputs: list[Any]) -> Any:
    """Micro-batches one after the other in one structure of tensors, where they fit; else as they are."""
    flat = [_pytree.tree_flatten(one) for one in outputs]
    first, structure = flat[0]
    for leaves, other in flat:
        fits = other == structure and all(
            isinstance(a, torch.Tensor) and a.dim() > 0 and isinstance(b, torch.Tensor) and a.shape[1:] == b.shape[1:]
            for a, b in zip(leaves, first, strict=True)
        )
        if not fits:
            return outputs
    return _pytree.tree_unflatten(
        [torch.cat(parts) for parts in zip(*(leaves for leaves, _ in flat), strict=True)], structure
    )
