"""The module that a pipeline trains: an `nn.Module` with the layers of its own stage and no others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from typing_extensions import Self

from sheer.errors import UsageError
from sheer.pipeline.cut import Cut, CutLoss, find_loss
from sheer.pipeline.entry import Arguments, Batch, pair
from sheer.pipeline.layers import Given, Layers, from_base_seed, from_global_seed
from sheer.pipeline.recompute import Recompute, non_reentrant_checkpoint
from sheer.pipeline.slicing import Slice
from sheer.pipeline.split import Grid, canonical_names, choose_parts, find_grid, stages_of
from sheer.pipeline.topology import ProcessTopology
from sheer.pipeline.units import Source


class PipelineModule(nn.Module):
    """A model cut into stages, of which this process holds one.

        module = PipelineModule([LayerSpec(Embed, 256, 64), *[LayerSpec(Block, 64)] * 8, head], num_stages=2,
                                loss_fn=nn.CrossEntropyLoss())
        engine, *_ = sheer.initialize(model=module, config=config)
        loss = engine.train_batch(data_iter)

    Each layer takes what the one before it returned, as its one argument. Parameters have the names that the plain
    `nn.Sequential` of all layers would give them (`"3.weight"`: the global index), whatever the split, so checkpoints
    of either are read by the other. `from_module` cuts a model that has a forward of its own.

    Initial weights do not depend on the split. By default every layer has a seed of its own, which follows from
    `torch.manual_seed` and its index; with `seed_layers` it is `base_seed` + index. (Seed all ranks alike.) Layers
    given as modules come with the weights they have.

    Args:
        layers: `LayerSpec`s (built only where they run), modules, plain functions; or an `nn.Sequential`.
        num_stages: into how many stages; or `topology`, from whose `pipe` axis it is taken.
        loss_fn: `loss_fn(output, label)` on the last stage.
        seed_layers, seed_fn, base_seed: build layer i after `seed_fn(base_seed + i)`.
        partition_method: `"parameters"`, `"uniform"`, `"type:REGEX"` (on class names, in any case) balance the number
            of parameters, of layers, of layers of a type; `"time"` the seconds that rank 0 measures on `sample_input`.
        activation_checkpoint_interval: recompute every so many layers in the backward; 0: none.
        activation_checkpoint_func: `f(function, *args)`; by default torch's, non-reentrant.
        checkpointable_layers: class names; by default stretches with parameters are recomputed.
        dynamic_shape: accepted; shapes may always change from micro-batch to micro-batch.
        chunks: virtual stages per stage, for interleaved schedules.
        placement: `"loop"` (0 1 2 0 1 2), `"v"` (0 1 2 2 1 0), or the stage of each virtual stage.
        boundaries: where virtual stages begin and end, `[0, ..., number of layers]`; beats `partition_method`.
        sample_input: what the first layer takes, for `"time"`.
        stage: which stage this process is; by default its rank divided by the number of ranks per stage.

    Attributes:
        num_stages, stage, chunks: as above.
        placement: the stage of each virtual stage, in order of execution.
        parts: the layers of each virtual stage; equal on all ranks.
        loss_fn: as given.
        canonical: from the name of a parameter here to its name in the whole model, where they differ.
        tied: parameters that several stages hold, by name in the whole model; the first of the stages owns it.

    Raises:
        UsageError: on every rank; what is wrong with the layers, the split or the number of ranks.
    """

    num_stages: int
    stage: int
    chunks: int
    placement: tuple[int, ...]
    parts: tuple[range, ...]
    loss_fn: Callable[[Any, Any], Any] | None
    canonical: Mapping[str, str]
    tied: Mapping[str, tuple[int, ...]]

    def __init__(
        self,
        layers: Iterable[Given],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = non_reentrant_checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = True,
        *,
        chunks: int = 1,
        placement: str | Sequence[int] = "loop",
        boundaries: Sequence[int] | None = None,
        sample_input: Any = None,
        stage: int | None = None,
    ) -> None:
        super().__init__()
        grid = find_grid(num_stages, topology=topology, stage=stage, chunks=chunks, placement=placement)
        source = Layers(layers, seeding=from_base_seed(base_seed, seed_fn) if seed_layers else from_global_seed())
        parts = choose_parts(source, grid, method=partition_method, boundaries=boundaries, sample=sample_input)
        recompute = Recompute(activation_checkpoint_interval, activation_checkpoint_func, checkpointable_layers)
        self._settle(source, grid, parts, loss_fn=loss_fn, recompute=recompute)

    @classmethod
    def from_module(
        cls,
        model: nn.Module,
        *,
        blocks: str | Sequence[str],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        inputs: str | Sequence[str] | None = None,
        labels: str | Sequence[str] | None = None,
        constants: Mapping[str, Any] | None = None,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = non_reentrant_checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        chunks: int = 1,
        placement: str | Sequence[int] = "loop",
        boundaries: Sequence[int] | None = None,
        sample_input: Any = None,
        stage: int | None = None,
    ) -> Self:
        """This process's stage of a plain `model`, cut at its blocks.

            module = PipelineModule.from_module(model, blocks="transformer.h.*", num_stages=2)

        The forward of the model is recorded once (torch.fx), in training and in evaluation mode; modules that contain
        no block are called as they are, hooks and all. The units are what comes before the first block, each block,
        and what comes after the last. The stage holds the model's own submodule objects under the model's own names,
        so a pipeline run and a plain run read each other's checkpoints; drop the model to free the rest.

        Args:
            blocks: globs over module names; the outermost modules they match stay whole.
            loss_fn: `loss_fn(output, label)`. Without one the model makes its own loss, and a batch's labels are only
                needed on the last stage.
            inputs: the arguments of forward that come with each batch; by default those in `sample_input`, else those
                without a default.
            labels: the arguments that only the model's own loss needs; by default `labels` or `targets` where it has
                such an argument. `()`: none.
            constants: values of other arguments, where not their defaults.
            sample_input: arguments of one call (a dict by name, or by position). Needed where the forward branches on
                something that follows from its inputs: the branch is taken as for the sample, and checked in every run.

        All other arguments are those of the class. Every rank calls it, with the same model.

        Raises:
            UsageError: on every rank; what cannot be recorded, with the line of the forward, and what helps.
        """
        grid = find_grid(num_stages, topology=topology, stage=stage, chunks=chunks, placement=placement)
        source = Cut(
            model,
            blocks=blocks,
            inputs=inputs,
            labels=labels,
            constants=constants,
            own_loss=loss_fn is None,
            sample=sample_input,
        )
        parts = choose_parts(source, grid, method=partition_method, boundaries=boundaries, sample=sample_input)
        recompute = Recompute(activation_checkpoint_interval, activation_checkpoint_func, checkpointable_layers)
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._settle(source, grid, parts, loss_fn=loss_fn, recompute=recompute)
        module._arguments = source.entry
        if loss_fn is None:
            module._own_loss = source.loss
            module.__dict__["loss_fn"] = module._make_loss
        module._unlabelled = source.unlabelled() if grid.stages == 1 else None
        return module

    def _settle(
        self,
        source: Source,
        grid: Grid,
        parts: tuple[range, ...],
        *,
        loss_fn: Callable[[Any, Any], Any] | None,
        recompute: Recompute,
    ) -> None:
        """Keep this stage of `source`."""
        self.num_stages, self.stage, self.chunks, self.placement = grid.stages, grid.stage, grid.chunks, grid.placement
        self.parts = parts
        self._topology = grid.topology
        self._arguments: Arguments | None = None
        self._own_loss: CutLoss | None = None
        self._unlabelled: tuple[Slice, Slice] | None = None
        self._recompute = recompute
        mine = [unit for part in self._local_parts() for unit in part]
        ties = source.ties()
        holders = {name: stages_of(held, parts, grid.placement) for name, held in ties.items()}
        self.tied = {name: stages for name, stages in holders.items() if len(stages) > 1}
        self.canonical = canonical_names(ties, set(mine))
        self._units = dict(source.populate(self, mine))
        if self.is_last:
            self.loss_fn = loss_fn
        else:  # a loss with parameters or buffers is the last stage's
            self.__dict__["loss_fn"] = loss_fn

    # ---- running

    def run(self, carry: Any, *, chunk: int = 0) -> Any:
        """This stage's layers of one chunk, on what the virtual stage before it returned (first: the inputs as given).

        It is a call of the module: its hooks run, and compiling the whole module compiles this.
        """
        return self(carry, pipeline_chunk=chunk)

    def forward(self, *inputs: Any, pipeline_chunk: int | None = None, **named: Any) -> Any:
        """All layers, where there is one stage.

        Raises:
            UsageError: there are several stages.
        """
        if pipeline_chunk is not None:
            return self._run_part(self._local_parts()[pipeline_chunk], *inputs)
        if self.num_stages > 1:
            raise UsageError(
                f"this module holds stage {self.stage} of {self.num_stages}, so it cannot run by itself; call"
                " engine.train_batch(data_iter) or engine.eval_batch(data_iter) on every rank"
            )
        return self._run_whole(*inputs, **named)

    def _run_whole(self, *inputs: Any, **named: Any) -> Any:
        """What the plain model returns."""
        if self._arguments is None:
            return self._run_chunks(*inputs, **named)
        given = self._arguments.of_call(inputs, named)
        labels = {name: given.pop(name) for name in self._arguments.labels if given.get(name) is not None}
        if self._own_loss is None or labels:
            output = self._run_chunks(given)
            return output if self._own_loss is None else self._own_loss.whole(self, output, labels)
        if self._unlabelled is None:
            raise UsageError(f"the model was cut with the labels {', '.join(self._arguments.labels)}; give them")
        return self._unlabelled[0 if self.training else 1].run(self, given)

    def _run_chunks(self, carry: Any) -> Any:
        for part in self._local_parts():
            carry = self._run_part(part, carry)
        return carry

    def _make_loss(self, output: Any, label: Any) -> Any:
        """The loss that the model itself makes."""
        return find_loss(output) if self._own_loss is None else self._own_loss(self, output, label)

    def _run_part(self, part: range, carry: Any) -> Any:
        for stretch in self._recompute.stretches(part):
            units = [self._units[index] for index in stretch]
            carry = self._recompute.run(self, units, carry)
        return carry

    def _local_parts(self) -> list[range]:
        return [part for part, stage in zip(self.parts, self.placement, strict=True) if stage == self.stage]

    def split_batch(self, batch: Any) -> Batch:
        """What the loader gave for one micro-batch, as inputs of the first stage and label of the last.

        A pair (inputs, label); for a model that was cut also a dict of its arguments.

        Raises:
            DataError: it is neither.
        """
        return pair(batch) if self._arguments is None else self._arguments.split(batch)

    # ---- where it stands

    @property
    def is_first(self) -> bool:
        """Whether it holds the first virtual stage, which takes the inputs."""
        return self.placement[0] == self.stage

    @property
    def is_last(self) -> bool:
        """Whether it holds the last virtual stage, which takes the labels."""
        return self.placement[-1] == self.stage

    def chunk_of(self) -> dict[str, int]:
        """The chunk that alone uses a parameter, by its name here; empty where there is one chunk.

        As far as layers say what they use: a function may read any parameter.
        """
        if self.chunks == 1:
            return {}
        users: dict[int, set[int]] = {}
        used = [[name for unit in part for name in self._units[unit].names] for part in self._local_parts()]
        if self.is_last:
            used[-1].append("loss_fn")
        parameters = dict(self.named_parameters(remove_duplicate=False))
        for chunk, names in enumerate(used):
            for fqn, param in parameters.items():
                if any(fqn == name or fqn.startswith(f"{name}.") for name in names):
                    users.setdefault(id(param), set()).add(chunk)
        return {fqn: min(users[id(p)]) for fqn, p in parameters.items() if len(users.get(id(p), ())) == 1}

    def calls(self) -> tuple[str, ...]:
        """The modules that this stage calls one by one, and whose parameters nothing else of it reads."""
        units = [self._units[unit] for part in self._local_parts() for unit in part]
        read = {name for unit in units for name in unit.reads}
        called = dict.fromkeys(name for unit in units for name in unit.calls)
        if isinstance(self._modules.get("loss_fn"), nn.Module):
            called["loss_fn"] = None
        return tuple(name for name in called if not any(f"{one}.".startswith(f"{name}.") for one in read))

    def topology(self) -> ProcessTopology:
        """The grid of all ranks."""
        return self._topology

    def num_pipeline_stages(self) -> int:
        """`num_stages`, under DeepSpeed's name."""
        return self.num_stages

    def stage_owner(self, layer_idx: int) -> int:
        """The stage that holds layer `layer_idx`."""
        for part, stage in zip(self.parts, self.placement, strict=True):
            if layer_idx in part:
                return stage
        raise UsageError(f"layer {layer_idx} is outside 0 .. {self.parts[-1].stop - 1}")

    def partitions(self) -> list[int]:
        """Where virtual stages begin and end: `[0, ..., number of layers]`."""
        return [0, *(part.stop for part in self.parts)]

    def set_checkpoint_interval(self, interval: int) -> None:
        """Recompute every `interval` layers in the backward from now on; 0: none."""
        self._recompute = self._recompute.every(interval)

    def get_additional_losses(self) -> dict[str, Any] | None:
        """What a subclass wants to be reported beside the loss; None here, as in DeepSpeed."""
        return None

    def extra_repr(self) -> str:
        """The stage, and which layers it holds."""
        held = ", ".join(f"{part.start} .. {part.stop - 1}" if part else "none" for part in self._local_parts())
        return f"stage {self.stage} of {self.num_stages}: layers {held} of {self.parts[-1].stop}"
