"""`Config`: what was asked, frozen and checked as a whole."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, PrivateAttr, ValidationError

from sheer.config.catalogue import Catalogue, catalogue
from sheer.config.checks import contradictions
from sheer.config.foreign import Fate
from sheer.config.kinds import Choice, Interval, Maybe, Real, Whole
from sheer.config.reading import read, translate
from sheer.config.sections import (
    DTYPES,
    Bf16,
    Checkpoint,
    Compile,
    CsvMonitor,
    DataLoader,
    DataTypes,
    DType,
    Fp16,
    OnOff,
    Optimizer,
    Pipeline,
    Scheduler,
    Section,
    TensorBoard,
    TorchAutocast,
    Wandb,
    ZeroOptimization,
)
from sheer.config.source import read_source
from sheer.errors import ConfigError

Count = Annotated[int | None, Maybe(Whole(minimum=1))]


@dataclass(frozen=True)
class Origin:
    """Where a config's values came from."""

    name: str
    """How errors name it: the file's path, or "config"."""
    raw: dict[str, Any]
    given: frozenset[str]
    auto: tuple[str, ...]
    foreign: dict[str, Any]
    notes: dict[str, str]


class Config(Section):
    """A whole configuration. Make one with `Config.load(path_or_dict)`, or with keywords: `Config(train_batch_size=8)`.

    Every way in runs the same checks, and raises one `ConfigError` that lists every problem.
    """

    train_batch_size: Count = None
    """Samples per optimizer step over all ranks: micro-batch * accumulation * data-parallel size. One or two of
    the three may be left out."""
    train_micro_batch_size_per_gpu: Count = None
    """Samples per forward on one rank."""
    gradient_accumulation_steps: Count = None
    """Forwards per optimizer step on one rank; 1 where nothing else follows from the other two."""
    optimizer: Optimizer | None = None
    scheduler: Scheduler | None = None
    gradient_clipping: Annotated[float, Real(minimum=0)] = 0.0
    """Scale gradients down to this global 2-norm where they exceed it; 0 means never."""
    steps_per_print: Annotated[int | None, Interval()] = None
    """Log a line every this many optimizer steps; null means never."""
    communication_data_type: Annotated[DType | None, Maybe(DTYPES)] = None
    """In which format gradients travel between ranks; null means the model's dtype."""
    prescale_gradients: OnOff = False
    """Divide gradients before they are summed over ranks instead of afterwards."""
    gradient_predivide_factor: Annotated[float, Real(above=0)] = 1.0
    """With prescale_gradients: divide by this before the sum, and by the rest of the number of ranks afterwards."""
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], Choice(("mean", "sum"))] = "mean"
    """Whether gradients are averaged or summed over ranks."""
    fp16: Fp16 = Fp16()
    bf16: Bf16 = Bf16()
    torch_autocast: TorchAutocast = TorchAutocast()
    data_types: DataTypes = DataTypes()
    zero_optimization: ZeroOptimization = ZeroOptimization()
    compile: Compile = Compile()
    checkpoint: Checkpoint = Checkpoint()
    pipeline: Pipeline = Pipeline()
    dataloader_drop_last: OnOff = False
    """Leave out the samples at an epoch's end that do not fill a batch."""
    data_loader: DataLoader = DataLoader()
    csv_monitor: CsvMonitor = CsvMonitor()
    tensorboard: TensorBoard = TensorBoard()
    wandb: Wandb = Wandb()

    _origin: Origin = PrivateAttr()

    def __init__(self, **given: Any) -> None:
        """Check `given` (the keys of a config file) as a whole.

        Raises:
            ConfigError: lists every problem, each with its dotted path.
        """
        name, content = read_source(given)
        self._build(content, name=name)

    @property
    def low_precision(self) -> Literal["bf16", "fp16"] | None:
        """The section by which the parameters are cast to 16 bits; None where they keep their dtype."""
        return "bf16" if self.bf16.enabled else "fp16" if self.fp16.enabled else None

    @classmethod
    def load(cls, source: str | os.PathLike[str] | Mapping[str, Any] | Config) -> Config:
        """The config in a JSON file, in a mapping, or (as it is) in a `Config`.

        Raises:
            ConfigError: the file cannot be read, is not JSON, says a key twice, or asks for something wrong.
        """
        if isinstance(source, Config):
            return source
        name, content = read_source(source)
        config = cls.__new__(cls)
        config._build(content, name=name)
        return config

    def _build(self, given: Mapping[str, Any], *, name: str) -> None:
        """Fill this new object from `given`, or raise with every problem."""
        known = self.catalogue()
        reading = read(given, catalogue=known)
        problems = list(reading.problems)
        try:
            BaseModel.__init__(self, **reading.values)
        except ValidationError as error:
            translation = translate(error, values=reading.values, catalogue=known)
            problems += translation.problems
            BaseModel.__init__(self, **translation.values)  # the rest, so that its contradictions are told as well
        problems += contradictions(self)
        if problems:
            count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
            raise ConfigError("\n  - ".join([f"{name}: {count}:", *problems]))
        self._origin = Origin(
            name=name,
            raw=dict(given),
            given=frozenset(reading.given),
            auto=tuple(reading.auto),
            foreign=reading.foreign,
            notes=reading.notes,
        )

    @classmethod
    def catalogue(cls) -> Catalogue:
        """Every key that a config may hold."""
        return catalogue(cls)

    @property
    def origin(self) -> Origin:
        """Where the values came from: given, default or auto."""
        return self._origin

    @property
    def raw(self) -> dict[str, Any]:
        """The user's dict as given, "auto" and keys without effect included."""
        return self._origin.raw

    @property
    def auto(self) -> tuple[str, ...]:
        """The dotted paths that were given as "auto" and have their default."""
        return self._origin.auto

    @property
    def without_effect(self) -> dict[str, str]:
        """The given keys of DeepSpeed that nothing in Sheer reads, by dotted path, each with a sentence why."""
        entries = self.catalogue().entries
        auto = [path for path in self.auto if path in entries and entries[path].fate is not Fate.ACTS]
        return {path: entries[path].remark for path in [*self._origin.foreign, *auto]}

    def to_dict(self) -> dict[str, Any]:
        """The resolved values as a new plain dict, defaults included; `Config.load` of it gives the same values."""
        return self.model_dump()
