"""An engine's verbs for checkpoints: what happens to the engine around a save and a load."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sheer import checkpoint, persist
from sheer.errors import TornLoadError, UsageError

if TYPE_CHECKING:
    import torch

    from sheer.comm import Mesh
    from sheer.config import Config
    from sheer.data import ResumableLoader
    from sheer.observe import Teller
    from sheer.optim.loss_scale import LossScale
    from sheer.pipelining import Pipeline
    from sheer.planning import Plan


class CheckpointVerbs(ABC):
    """Saves and loads. A base of `Engine` only."""

    module: torch.nn.Module
    device: torch.device
    counters: persist.Counters
    lr_scheduler: Any
    training_dataloader: ResumableLoader | None
    _background: checkpoint.Background
    _config: Config
    _mesh: Mesh
    _plan: Plan
    _params: Mapping[str, torch.nn.Parameter]
    _ties: Mapping[str, str]
    _group_of: Mapping[str, int]
    _scale: LossScale | None
    _pipeline: Pipeline | None
    _own_iterator: Iterator[Any] | None
    _teller: Teller
    _torn: bool

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        blocking: bool | None = None,
    ) -> bool:
        """Save everything a run needs to go on, as `save_dir/tag` (`global_stepN` by default). Collective.

        `client_state` must be JSON. Refused in the middle of a step. On an error nothing that was there is lost.

        With `blocking=False` (None asks the config, `checkpoint.async_save`) it returns once all is checked, and
        parameters and buffers are copied to host memory, which is kept for the next time. A thread copies the
        optimizer's state, for which the next update waits, then writes and commits beside training. What goes wrong
        there (or where that state is written to by hand meanwhile) raises CheckpointError at the end of a later step,
        the same on every rank, or at `wait_for_checkpoint`. One save at a time: the next one waits for it, as do a
        load, `destroy` and the end of the interpreter.
        """
        self._check_alive()
        self._require_between_steps("save_checkpoint")
        if self._background.running:
            self._teller.info("save_checkpoint: the save before this one is still being written; waiting for it")
            self._end_save()
        if blocking is None:
            blocking = not self._config.checkpoint.async_save
        persist.save(
            self._saved_parts(),
            save_dir,
            tag=tag if tag is not None else f"global_step{self.counters.global_steps}",
            client_state=_client_state(client_state),
            save_latest=save_latest,
            exclude_frozen=exclude_frozen_parameters,
            background=None if blocking else self._background,
        )
        return True

    def wait_for_checkpoint(self) -> None:
        """Wait until the save that goes on beside training is committed; return at once where there is none.
        Collective. Raises CheckpointError on every rank where it failed on any."""
        self._check_alive(torn=True)
        self._end_save()

    def _end_save(self) -> None:
        """All ranks know alike whether a save is going on."""
        if not self._background.running:
            return
        error = self._background.end()

        def heed() -> None:
            if error is not None:
                raise error

        checkpoint.together(self._mesh.world, "saving beside training", heed)

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
        *,
        include: str | Sequence[str] = "*",
        exclude: str | Sequence[str] = (),
        rename: Mapping[str, str] | None = None,
        reset_optimizer: bool = False,
        load_hyperparameters: bool = True,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load `load_dir/tag` (by default what `latest` names), whatever stage, ranks or precision saved it.

        Collective. Returns its path and the client state; (None, None), said, where `load_dir` has no checkpoint.
        `load_module_only` takes parameters and buffers alone; `custom_load_fn(src=..., dst=module)` moves them from a
        dict of full tensors by hand. `reset_optimizer` takes no optimizer state and forgets what there is; else
        hyper-parameters become the checkpoint's, said where they differ, unless `load_hyperparameters=False`.

        `rename` says what names of the checkpoint are here, of tensors or of modules with all that is in them
        (`{"encoder": "backbone.encoder"}`; "" is the whole model). `include` and `exclude` are globs over the names
        here: what they leave out is not looked at, in the checkpoint or here, and, but for weights, nothing is loaded.

        On an error nothing has changed (but for what `custom_load_fn` did). Only where a disk fails between verifying
        and taking over, TornLoadError: this engine then does nothing but load again.
        """
        self._check_alive(torn=True)
        self._require_here()
        names = checkpoint.Names(_patterns("include", include), _patterns("exclude", exclude), _renames(rename))
        if custom_load_fn is not None and (names.partial or names.rename):
            raise UsageError(
                "load_checkpoint: custom_load_fn is given the whole checkpoint under its own names, so include, "
                "exclude and rename cannot be obeyed; choose and rename inside it"
            )
        if custom_load_fn is not None and self._config.checkpoint.use_node_local_storage:
            raise UsageError(
                "load_checkpoint: custom_load_fn is given all of the checkpoint, which no node's folder has with "
                "checkpoint.use_node_local_storage; copy the folders of all nodes together, and set it to false"
            )
        self._end_save()
        everything = not load_module_only and not names.partial
        wish = persist.Wish(
            strict=load_module_strict,
            names=names,
            optimizer=load_optimizer_states and not reset_optimizer and everything,
            reset=reset_optimizer,
            settings=load_hyperparameters,
            scheduler=load_lr_scheduler_states and everything,
            run=everything,
        )
        try:
            loaded = persist.load(self._saved_parts(), load_dir, tag=tag, wish=wish, custom=custom_load_fn)
        except TornLoadError:
            self._torn = True
            raise
        if loaded is None:
            return None, None
        self._torn = False
        self._forget()
        self._own_iterator = None
        if self._pipeline is not None:
            self._pipeline.forget()
        return str(loaded.path), loaded.client_state

    def _saved_parts(self) -> persist.SavedParts:
        return persist.SavedParts(
            module=self.module,
            plan=self._plan,
            params=self._params,
            ties=self._ties,
            groups=self._group_of,
            config=self._config,
            device=self.device,
            counters=self.counters,
            scheduler=self.lr_scheduler,
            loss_scale=self._scale,
            loader=self.training_dataloader,
            teller=self._teller,
        )

    # --- what the engine brings ---

    @abstractmethod
    def _check_alive(self, *, torn: bool = False) -> None: ...

    @abstractmethod
    def _require_between_steps(self, what: str) -> None: ...

    @abstractmethod
    def _require_here(self, *, evaluating: bool = False) -> None: ...

    @abstractmethod
    def _forget(self) -> None: ...


def _patterns(name: str, given: str | Sequence[str]) -> tuple[str, ...]:
    patterns = (given,) if isinstance(given, str) else given
    if not isinstance(patterns, list | tuple | set | frozenset) or not all(isinstance(one, str) for one in patterns):
        raise UsageError(f"load_checkpoint: {name}={given!r:.80}; it is a glob such as 'encoder.*', or a list of them")
    return tuple(patterns)


def _renames(given: Mapping[str, str] | None) -> Mapping[str, str]:
    renames = {} if given is None else given
    if not isinstance(renames, Mapping) or not all(isinstance(one, str) for one in (*renames, *renames.values())):
        raise UsageError(f"load_checkpoint: rename={given!r:.80}; it is a dict of stored name -> name here")
    return renames


def _client_state(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if not isinstance(given, Mapping | None):
        raise UsageError(f"save_checkpoint: client_state is a dict that JSON can hold, not a {type(given).__name__}")
    return given or {}
