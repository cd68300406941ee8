"""Running one stage's share of a schedule: a dumb interpreter of its actions.

    F  take the carry (the input, or what has arrived), run this stage's layers, send the result on or take the loss
    B  take the gradient of what was sent, go backward, send on the gradient of what had arrived
    I  the same, without the weights; W: the weights

What one forward leaves for its backward (a `_Flight`) is held from F to B, or to W, and no longer. Of an output only
its place in autograd's graph is kept; its memory is free once it has been sent and nothing in the graph needs it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_map_only

from sheer.comm import Links, rank
from sheer.errors import CommError, UsageError
from sheer.pipeline.backward import Cheap, Later, Root, Tell, backward, backward_inputs
from sheer.pipeline.mail import Item, Mail, PeerFailed
from sheer.pipeline.structure import Packed, pack
from sheer.schedule import Action, Carried, Kind, Schedule

Run = Callable[..., Any]
"""`run(carry, chunk=k)`: this stage's layers of chunk k."""
Loss = Callable[[Any, Any], torch.Tensor]
Scale = Callable[[torch.Tensor], torch.Tensor]
Around = Callable[[Action], AbstractContextManager[Any]]
"""What to do around each action of this stage."""


class Outcome(NamedTuple):
    """What a step gave, on the stage that holds the last layers; elsewhere both are empty."""

    losses: tuple[torch.Tensor, ...]
    """One per micro-batch, detached."""
    outputs: tuple[Any, ...]
    """What the last layer returned, per micro-batch, where outputs were asked for."""


@dataclass
class _Flight:
    """What a forward leaves for its backward."""

    leaves: tuple[torch.Tensor, ...]
    """The tensors that arrived and need gradients, in the order in which their gradients go back."""
    edges: tuple[GradientEdge, ...]
    """Where the gradients of the output enter the graph."""
    loss_grad: torch.Tensor | None = None
    """The gradient of the loss, on the last virtual stage; elsewhere gradients arrive."""
    later: Later | None = None
    """The second half of the backward, between I and W."""


@dataclass
class _Step:
    """One step under way; by virtual stage and micro-batch, or by micro-batch."""

    inputs: Sequence[Any] | None
    labels: Sequence[Any] | None
    keep_outputs: bool
    flights: dict[tuple[int, int], _Flight] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)


class Arrived(torch.autograd.Function):
    """A received tensor as the layers see it: like any activation, it may be overwritten in place."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        """The same memory."""
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        """The same gradient."""
        return grads[0]


class Runner:
    """Runs stage `stage` of `schedule`, once per `step`.

    Args:
        schedule: a valid one; all stages have the same.
        stage: this process's.
        run: this stage's layers.
        loss: `loss(output, label)` on the stage of the last layers; None where no loss is wanted (evaluation only).
        links: `build_links(pipe, routes(schedule))`.
        device: where received tensors go.
        around: the engine's work around each forward, its loss included, and each backward (I and W are one each).
        cheap: whether a hook that unpacks what autograd has saved may run in both halves of a backward.
        scale: applied to the loss before its backward (fp16), not to the loss that is returned.
        on_failure: what the engine has to do where a step fails, before all ranks agree that it has: what the ranks
            of other pipelines, which go on until then, expect of this one.
        tell: hears what the user should know of this stage's graph; each text may come often.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        stage: int,
        run: Run,
        loss: Loss | None,
        links: Links,
        device: torch.device,
        around: Around = lambda action: nullcontext(),
        cheap: Cheap = lambda hook: False,
        scale: Scale = lambda loss: loss,
        on_failure: Callable[[], None] = lambda: None,
        tell: Tell = lambda text: None,
    ) -> None:
        self.schedule = schedule
        self.stage = stage
        self.peak_in_flight = 0
        """The most micro-batches (one counted per chunk) whose activations the last step held at once."""
        self._run = run
        self._loss = loss
        self._links = links
        self._around = around
        self._cheap = cheap
        self._scale = scale
        self._on_failure = on_failure
        self._tell = tell
        self._mail = Mail(schedule, stage, links, device)
        self._actions = [action for action in schedule.actions[stage] if action.kind in _VERBS]
        self._trains = any(action.kind is not Kind.FORWARD for action in self._actions)
        self._virtual = [schedule.virtual(stage, chunk) for chunk in range(schedule.chunks)]
        self._end = len(schedule.placement) - 1
        self._broken = False

    def step(
        self, inputs: Sequence[Any] | None = None, labels: Sequence[Any] | None = None, *, keep_outputs: bool = False
    ) -> Outcome:
        """Run all forwards and backwards of one step. Collective on the ranks that `links` ends steps with.

        `inputs` (per micro-batch) are needed where the first layers are, `labels` where the last are. When a stage
        raises, every other raises a CommError with its rank, stage, action and traceback; the gradients are incomplete
        then, but the next step can run. (Not after a CommError of the transport itself: then it refuses.)
        """
        if self._broken:
            raise CommError(
                f"stage {self.stage}: an earlier step was broken off in the middle of a message, so this pipeline "
                "cannot go on; start the processes again, from a checkpoint"
            )
        step = _Step(inputs, labels, keep_outputs)
        self.peak_in_flight = 0
        self._broken = True  # until the links are known to be clean
        action: Action | None = None
        try:
            self._mail.begin()
            self._check(inputs, labels)
            with torch.set_grad_enabled(self._trains):
                for action in self._actions:
                    _VERBS[action.kind](self, action, step)
            self._mail.end()
        except CommError as error:
            raise self._links.lost(error) from error
        except PeerFailed:
            self._end_in_failure(None)
        except Exception as error:
            self._end_in_failure(_report(error, f"stage {self.stage}", action))
            raise
        else:
            self._conclude(None)
        return Outcome(_in_order(step.losses), _in_order(step.outputs))

    def _check(self, inputs: Sequence[Any] | None, labels: Sequence[Any] | None) -> None:
        needs = {"inputs": (inputs, 0 in self._virtual), "labels": (labels, self._loss and self._end in self._virtual)}
        for name, (given, needed) in needs.items():
            if needed and (given is None or len(given) != self.schedule.micro_batches):
                raise UsageError(
                    f"stage {self.stage} needs {name} for {self.schedule.micro_batches} micro-batches, not "
                    f"{'None' if given is None else len(given)}"
                )

    # --- forward ----------------------------------------------------------------------------------------------------

    def _forward(self, action: Action, step: _Step) -> None:
        virtual, micro_batch = self._virtual[action.chunk], action.micro_batch
        carry, leaves = self._carry(step, virtual, micro_batch)
        with self._around(action):
            output = self._run(carry, chunk=action.chunk)
            del carry
            ended = self._finish(output, step, micro_batch) if virtual == self._end else None
        if ended is not None:
            flight = ended
        else:
            packed = _fixed(pack(output, what=f"the output of virtual stage {virtual}"))
            flight = _Flight((), tuple(get_gradient_edge(t) for t in packed.tensors if t.requires_grad))
            self._mail.post(Item(Carried.ACTIVATION, virtual + 1, micro_batch), packed)
        if self._trains:
            flight.leaves = leaves
            step.flights[virtual, micro_batch] = flight
            self.peak_in_flight = max(self.peak_in_flight, len(step.flights))

    def _carry(self, step: _Step, virtual: int, micro_batch: int) -> tuple[Any, tuple[torch.Tensor, ...]]:
        """What the layers are given, and the leaves in it that need gradients."""
        if virtual == 0:
            assert step.inputs is not None
            return step.inputs[micro_batch], ()
        blueprint, received = self._mail.take(Item(Carried.ACTIVATION, virtual, micro_batch))
        tensors, leaves = list(received), []
        for place, spec in enumerate(blueprint.tensors):
            if spec.wants_grad and self._trains:
                leaves.append(received[place].requires_grad_())
                tensors[place] = Arrived.apply(received[place])  # type: ignore[no-untyped-call]
        return blueprint.build(tensors), tuple(leaves)

    def _finish(self, output: Any, step: _Step, micro_batch: int) -> _Flight:
        """The last virtual stage: keep the output on request, take the loss."""
        if step.keep_outputs:
            step.outputs[micro_batch] = tree_map_only(torch.Tensor, torch.Tensor.detach, output)
        if self._loss is None:
            return _Flight((), ())
        assert step.labels is not None
        loss = self._loss(output, step.labels[micro_batch])
        _check_loss(loss, trains=self._trains)
        step.losses[micro_batch] = loss.detach()
        if not self._trains:
            return _Flight((), ())
        scaled = self._scale(loss)
        return _Flight((), (get_gradient_edge(scaled),), loss_grad=torch.ones_like(scaled))

    # --- backward ---------------------------------------------------------------------------------------------------

    def _backward(self, action: Action, step: _Step) -> None:
        flight = step.flights.pop((self._virtual[action.chunk], action.micro_batch))
        roots = self._roots(flight, action)
        flight.edges = ()
        with self._around(action):
            backward(roots)
        roots.clear()
        self._send_back(flight, action)

    def _backward_inputs(self, action: Action, step: _Step) -> None:
        flight = step.flights[self._virtual[action.chunk], action.micro_batch]
        roots = self._roots(flight, action)
        flight.edges = ()
        with self._around(action):
            flight.later = backward_inputs(roots, flight.leaves, tell=self._tell, cheap=self._cheap)
        self._send_back(flight, action)
        flight.leaves = ()

    def _backward_weights(self, action: Action, step: _Step) -> None:
        flight = step.flights.pop((self._virtual[action.chunk], action.micro_batch))
        assert flight.later is not None
        with self._around(action):
            flight.later()

    def _roots(self, flight: _Flight, action: Action) -> list[Root]:
        virtual = self._virtual[action.chunk]
        if virtual == self._end:
            assert flight.loss_grad is not None
            return [Root(flight.edges[0], flight.loss_grad)]
        parcel = self._mail.take(Item(Carried.GRADIENT, virtual, action.micro_batch))
        grads = parcel.blueprint.build(parcel.tensors)
        return [Root(edge, grad) for edge, grad in zip(flight.edges, grads, strict=True) if grad is not None]

    def _send_back(self, flight: _Flight, action: Action) -> None:
        """The gradients of what had arrived; None for what the loss does not depend on."""
        virtual = self._virtual[action.chunk]
        if virtual > 0:
            packed = pack(
                [leaf.grad for leaf in flight.leaves], what=f"a gradient of the input of virtual stage {virtual}"
            )
            self._mail.post(Item(Carried.GRADIENT, virtual - 1, action.micro_batch), packed)

    # --- the end ----------------------------------------------------------------------------------------------------

    def _end_in_failure(self, report: str | None) -> None:
        try:
            self._mail.fail()
            self._on_failure()
            self._mail.end_in_failure()
        except CommError as error:
            raise self._links.lost(error) from error
        self._conclude(report)

    def _conclude(self, report: str | None) -> None:
        """All ranks end the step; raise where another has failed and this has not."""
        failures = self._links.failures(report)
        self._broken = False
        if failures and report is None:
            raise CommError("\n\n".join(["the step was stopped because another stage failed", *failures]))


_VERBS: dict[Kind, Callable[[Runner, Action, _Step], None]] = {
    Kind.FORWARD: Runner._forward,
    Kind.BACKWARD: Runner._backward,
    Kind.INPUT: Runner._backward_inputs,
    Kind.WEIGHT: Runner._backward_weights,
}
"""REDUCE and STEP are the engine's."""


def _fixed(packed: Packed) -> Packed:
    """With copies of what needs no gradient: that may be a layer's buffer or cache, which its next forward overwrites
    while this message is still on its way."""
    own = tuple(t if t.requires_grad else t.clone(memory_format=torch.contiguous_format) for t in packed.tensors)
    return packed._replace(tensors=own)


def _in_order(by_micro_batch: dict[int, Any]) -> tuple[Any, ...]:
    return tuple(by_micro_batch[k] for k in sorted(by_micro_batch))


def _report(error: Exception, where: str, action: Action | None) -> str:
    text = "".join(traceback.format_exception(error))
    return (
        f"rank {rank()}, {where}, at {action or 'the beginning of the step'}: {type(error).__name__}: {error}\n{text}"
    )


def _check_loss(loss: object, *, trains: bool) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
        raise UsageError(
            f"the loss of a micro-batch must be a scalar tensor, not a {type(loss).__name__}{shape}; take its mean() "
            "in loss_fn"
        )
    if trains and not loss.requires_grad:
        raise UsageError(
            "the loss depends on no parameter that trains, on this stage or any before it: it was computed under "
            "no_grad, detached, or every parameter it uses is frozen"
        )
