"""An engine's verbs that clear its device between steps, and fill it again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from sheer import device as devices
from sheer.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from sheer.checkpoint import Background
    from sheer.planning import Plan
    from sheer.zero import ZeroRuntime


class OffloadStateTypeEnum(str, Enum):
    """What `offload_states` can take away; DeepSpeed's names."""

    optim_states = "optim_states"
    """The optimizer's state of every element, such as Adam's moments."""
    hp_params = "hp_params"
    """The masters that stand beside the parameters."""
    lp_params = "lp_params"
    """The parameters that the model computes with; this rank's shards at stage 3."""
    lp_grads = "lp_grads"
    """The memory of gradients. Between steps there is nothing in it."""
    contiguous_grad_buffer = "contiguous_grad_buffer"
    """The same: here gradients lie in their buckets."""


class OffloadVerbs(ABC):
    """Moves state between device and host. A base of `Engine` only."""

    device: torch.device
    _background: Background
    _away: frozenset[OffloadStateTypeEnum]
    _plan: Plan
    _runtime: ZeroRuntime

    def offload_states(
        self,
        include: Iterable[OffloadStateTypeEnum | str] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move what the device holds between steps to the host, to make room for something else; all of it, or what
        `include` names (`OffloadStateTypeEnum`, or its values). `reload_states` brings it back.

        Meanwhile nothing trains: what needs it raises UsageError. Without the parameters (`lp_params`) nothing is
        evaluated either. Checkpoints are saved from where things are. Page-locked memory where `pin_memory`; done when
        it returns, whatever `non_blocking` says. What rests on the host or in files anyway stays there. Every rank
        decides for itself, but all must be back before they train.
        """
        self._require_between_steps("offload_states")
        if str(getattr(device, "value", device)) != "cpu":
            raise UsageError(f"offload_states(device={device!r}): only the host ('cpu') takes states in")
        wanted = _states(include) - self._away
        self._runtime.heed_user()
        self._move(wanted, to_host=True, pinned=pin_memory)
        self._away |= wanted

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states` took away; nothing where it took nothing. Done when it returns."""
        away, self._away = self._away, frozenset()
        self._move(away, to_host=False, pinned=False)

    @torch.inference_mode(False)  # what moves is trained again
    def _move(self, states: frozenset[OffloadStateTypeEnum], *, to_host: bool, pinned: bool) -> None:
        if not states:
            return
        self._background.settle()
        kinds = OffloadStateTypeEnum

        def carry(tensor: torch.Tensor, home: torch.device) -> torch.Tensor:
            return devices.to_host(tensor, pinned=pinned) if to_host else tensor.to(home)

        if kinds.lp_params in states:
            self._runtime.move_params(carry)
        if kinds.hp_params in states:
            self._runtime.move_masters(carry)
        if states & {kinds.lp_grads, kinds.contiguous_grad_buffer}:
            self._runtime.hold_gradients(not to_host)
        if self._plan.optimizer is not None:
            masters = [grad.flat.master for grad in self._runtime.grads]
            self._plan.optimizer.move(masters, carry if kinds.optim_states in states else None)

    def _require_here(self, *, evaluating: bool = False) -> None:
        """Refuse to train, or without parameters to evaluate, while states are away."""
        needed = frozenset({OffloadStateTypeEnum.lp_params}) if evaluating else self._away
        missing = sorted(state.value for state in self._away & needed)
        if missing:
            raise UsageError(f"{', '.join(missing)} are offloaded (offload_states): call engine.reload_states() first")

    @abstractmethod
    def _require_between_steps(self, what: str) -> None: ...


def _states(include: Any) -> frozenset[OffloadStateTypeEnum]:
    known = {state.value: state for state in OffloadStateTypeEnum}
    if include is None:
        return frozenset(OffloadStateTypeEnum)
    names = [str(getattr(one, "value", one)) for one in include]
    for name in names:
        if name not in known:
            raise UsageError(
                f"offload_states: there are no states {name!r}; there are {', '.join(known)}."
                f"{did_you_mean(name, known)}"
            )
    return frozenset(known[name] for name in names)
