"""`Init`: parameters are sharded while a plain constructor builds the model.

A parameter stays whole until one is registered on another module, or one that is sharded is used; then rank 0's value
is cut into shards. Whatever the constructors do with a sharded parameter afterwards (`self.apply(init_weights)`, a tie,
a copy) is a torch function, and gets it whole first. So it does not matter when a parameter is sharded, only how many
are whole at a time. Nothing of torch is changed: there are a torch function mode and two hooks on registration, all
gone at the end.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, NamedTuple, final
from weakref import WeakValueDictionary

import torch
from torch.nn.modules import module as nn_module
from torch.overrides import TorchFunctionMode

from sheer import comm
from sheer import device as devices
from sheer.comm import Axis, Lane, Vault
from sheer.config import Config
from sheer.errors import UsageError
from sheer.layout import STAGES, Placement
from sheer.zero.autograd import storage_of
from sheer.zero.flat import ShardedFlat
from sheer.zero.marks import built_place_of, mark, unmark_built
from sheer.zero.outside import looks_at_values, parameters_in
from sheer.zero.placing import Site, shard_alone
from sheer.zero.runtime import placed_of
from sheer.zero.units import ROOT

_ALONE = 2
"""How many hold a parameter's memory where only the parameter does: it, and who asks."""

_MEANINGLESS: Mapping[str, Any] = {
    "mpu": None,
    "zero_param_parallel_group": None,
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "sequence_data_parallel_group": None,
    "param_swapper": None,
    "tensor_overrides": None,
}
"""DeepSpeed's arguments that ask for what is not there, with the values that do not."""


@final
class Init:
    """`with sheer.zero.Init(): model = Model()` builds a model whose parameters are sharded: on no rank is more whole
    than the parameters of the module whose constructor runs. Collective: every rank builds the same model.

    Values are rank 0's, the same as without it for the same seed; buffers stay each rank's own until `initialize`. The
    parameters stay the objects they are and can be read inside `GatheredParameters`; `initialize` takes the shards over
    at stage 3, and makes them whole below it. Nothing is done on one rank, inside another `Init`, or for integers and
    lazy parameters, which `initialize` shards. Modules that are copied (`copy.deepcopy`) are whole until they are
    registered in another. Not for a `PipelineModule`, whose stages build different layers.

    Args:
        module: a model that is built already: its parameters are sharded at once.
        data_parallel_group: the process group to shard over; by default all ranks.
        config_dict_or_path, config: where it sets a stage below 3, nothing is done.
        enabled: False does nothing.
        dtype: what floating-point parameters become; by default they stay as they are built.
        remote_device, pin_memory, mem_efficient_linear: DeepSpeed's, without effect: `zero_optimization.offload_param`
            says where parameters are while the model trains.

    Raises:
        UsageError: another argument of DeepSpeed's that asks for something.
    """

    def __init__(
        self,
        module: torch.nn.Module | None = None,
        *,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        **others: Any,
    ) -> None:
        _refuse(others)
        given = config_dict_or_path if config is None else config
        if given is not None:
            stage = Config.load(given).zero_optimization.stage
            enabled = enabled and STAGES[stage].param is Placement.SHARDED
        self._leave = ExitStack()
        self._building: Building | None = None
        self._site = site_of(data_parallel_group, dtype) if enabled else None
        if module is not None and self._site is not None and self._site.axis.size > 1:
            building = Building(self._site)
            building.watch(module)
            building.settle()

    def __enter__(self) -> Init:
        if self._site is None or self._site.axis.size == 1 or building_here() is not None:
            return self
        self._building = Building(self._site)
        for register in (
            nn_module.register_module_parameter_registration_hook,
            nn_module.register_module_module_registration_hook,
        ):
            self._leave.callback(register(self._building.on_registration).remove)
        self._leave.enter_context(self._building)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave.close()
        building, self._building = self._building, None
        if building is not None and kind is None:
            building.settle()


def _refuse(others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        if name not in _MEANINGLESS:
            raise TypeError(f"zero.Init has no argument {name!r}")
        if value != _MEANINGLESS[name]:
            raise UsageError(f"zero.Init: {name}={value!r} is not there; leave it out")


def site_of(group: Any = None, dtype: torch.dtype | None = None) -> Site:
    """The ranks of `group`, by default all, and the device that will train."""
    device = devices.pick(devices.local_rank(rank=comm.rank()))
    comm.init_process_group(device)
    axis = comm.data_axis() if group is None else Axis(group)
    return Site(axis, Lane(axis), Vault(device), device, dtype)


def building_here() -> Building | None:
    """What the `Init` does that is active in this thread."""
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return next((mode for mode in modes if isinstance(mode, Building)), None)


class _Whole(NamedTuple):
    """A parameter that is whole for now."""

    param: torch.nn.Parameter
    owner: torch.nn.Module
    name: str


class Building(TorchFunctionMode):
    """Knows which parameters are whole."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self._site = site
        self._whole: dict[int, _Whole] = {}
        self._placeholders: WeakValueDictionary[int, ShardedFlat] = WeakValueDictionary()
        """Storage of a placeholder -> what it stands for."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Before `func` is run as ever."""
        kwargs = kwargs or {}
        if looks_at_values(func):
            wanted = list(parameters_in(args, kwargs))
            if any(self._is_away(param) for param in wanted):
                self._bring(wanted)
        return func(*args, **kwargs)

    def on_registration(self, owner: torch.nn.Module, name: str, what: Any) -> None:
        """A parameter or a module becomes part of `owner`."""
        with torch._C.DisableTorchFunction():
            if isinstance(what, torch.nn.Module):
                self.watch(what)
            elif what is not None:
                self._watch(owner, name, what)

    def watch(self, module: torch.nn.Module) -> None:
        """Shard what is whole in `module`, but for its last parameters."""
        for owner in module.modules():
            self.watch_own(owner)

    def watch_own(self, owner: torch.nn.Module) -> None:
        """The parameters that `owner` has itself are whole; they are sharded when others are."""
        with torch._C.DisableTorchFunction():
            for name, param in owner._parameters.items():
                if param is not None:
                    self._watch(owner, name, param)

    def _watch(self, owner: torch.nn.Module, name: str, param: torch.nn.Parameter) -> None:
        if id(param) in self._whole or not _can_shard(param) or placed_of(param) is not None:
            return
        of = self._placeholders.get(storage_of(param))
        if of is not None:  # Parameter(another) takes what that stands on, and is no torch function
            param.data = of.whole_value(0, self._site.axis).view(param.shape)
        self.rest(keep=[whole.param for whole in self._whole.values() if whole.owner is owner])
        self._whole[id(param)] = _Whole(param, owner, f"{type(owner).__name__}.{name}")

    def _is_away(self, param: torch.nn.Parameter) -> bool:
        placed = built_place_of(param)
        if placed is None or id(param) in self._whole:
            return False
        return not placed.gathering[ROOT].pins  # inside GatheredParameters it is whole

    def _bring(self, params: list[torch.nn.Parameter]) -> None:
        """Make `params` whole, and no others."""
        self.rest(keep=params)
        for param in filter(self._is_away, params):
            placed = built_place_of(param)
            assert placed is not None
            flat = placed.flats[0]
            param.data = flat.whole_value(0, placed.axis)
            self._whole[id(param)] = _Whole(param, torch.nn.Module(), flat.plan.slots[0].fqn)

    def rest(self, *, keep: Iterable[torch.nn.Parameter] = ()) -> None:
        """Shard what is whole, as rank 0 has it, but for `keep` and memory that others use. Collective."""
        kept = {id(param) for param in keep}
        resting = [whole for key, whole in self._whole.items() if key not in kept]
        if not resting:
            return
        in_use = self._site.axis.broadcast_object([_in_use(whole.param) for whole in resting])
        for whole, used in zip(resting, in_use, strict=True):
            if not used:
                self._shard(whole)

    def settle(self) -> None:
        """Shard everything. Collective."""
        with torch._C.DisableTorchFunction():
            for whole in list(self._whole.values()):
                self._shard(whole)

    def _shard(self, whole: _Whole) -> None:
        del self._whole[id(whole.param)]
        unmark_built(whole.param)  # it may be of another dtype by now
        placed = shard_alone(whole.param, whole.name, self._site)
        mark(whole.param, placed, built=True)
        flat = placed.flats[0]
        assert isinstance(flat, ShardedFlat)
        self._placeholders[flat.blank] = flat


def _can_shard(param: torch.nn.Parameter) -> bool:
    """Whether it has values, and can carry what leads back to them."""
    lazy = torch.nn.parameter.is_lazy(param)
    return not lazy and not param.is_meta and (param.is_floating_point() or param.is_complex()) and param.numel() > 0


def _in_use(param: torch.nn.Parameter) -> bool:
    """Whether anything else is a view of its memory, and may yet write there."""
    count: int = torch._C._storage_Use_Count(param.untyped_storage()._cdata)
    return count > _ALONE
