"""One frozen model per block of the config. Each is handed whole to the room that reads it.

The docstring under a field is its documentation everywhere: in `docs/config.md`, in the JSON schema and in editors.
Attribute names equal the JSON keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict

from sheer.config.kinds import Backend, Choice, Flag, Maybe, Names, Object, Real, Text, Whole

OnOff = Annotated[bool, Flag()]
Positive = Annotated[int, Whole(minimum=1)]
DTYPES = Choice(
    ("fp32", "bf16", "fp16"),
    aliases={"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"},
)
DType = Literal["fp32", "bf16", "fp16"]


class Section(BaseModel):
    """A block: frozen, closed to unknown keys, and documented by its fields' docstrings."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class Optimizer(Section):
    """Which optimizer to build, unless `initialize` was given one."""

    type: Annotated[str, Text(filled=True)]
    """DeepSpeed's name ("Adam", "AdamW", "Lion", ...), a class of `torch.optim`, or an import path."""
    params: Annotated[dict[str, Any], Object()] = {}
    """Keyword arguments of its constructor. An entry that is "auto" is left to the constructor's default."""


class Scheduler(Section):
    """Which learning-rate schedule to build, unless `initialize` was given one. It moves once per optimizer step."""

    type: Annotated[str, Text(filled=True)]
    """DeepSpeed's name ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"), a class of
    `torch.optim.lr_scheduler`, or an import path."""
    params: Annotated[dict[str, Any], Object()] = {}
    """Keyword arguments of its constructor. An entry that is "auto" is left to the constructor's default."""


class Fp16(Section):
    """Parameters and gradients in float16, fp32 masters, and a loss scale. Not together with bf16 or autocast."""

    enabled: OnOff = False
    """Train in float16."""
    loss_scale: Annotated[float, Real(minimum=0)] = 0.0
    """A fixed factor for the loss; 0 means a dynamic one."""
    initial_scale_power: Annotated[int, Whole(minimum=0, maximum=127)] = 16
    """The dynamic scale starts at 2 to this power."""
    loss_scale_window: Positive = 1000
    """The dynamic scale doubles after this many steps without overflow."""
    hysteresis: Positive = 2
    """The dynamic scale halves at this many overflows; the ones before it only skip their step."""
    consecutive_hysteresis: OnOff = False
    """Refill the tolerance after every step without overflow, so that only consecutive overflows count."""
    min_loss_scale: Annotated[float, Real(above=0)] = 1.0
    """The dynamic scale never falls below this; an overflow at it is an error."""


class Bf16(Section):
    """Parameters and gradients in bfloat16 with fp32 masters. Not together with fp16 or autocast."""

    enabled: OnOff = False
    """Train in bfloat16."""
    check_grad_overflow: OnOff = False
    """Skip a step whose gradients are not finite, instead of letting them reach the parameters."""


class TorchAutocast(Section):
    """fp32 parameters, with `torch.autocast` around the forward. Not together with fp16 or bf16."""

    enabled: OnOff = False
    """Run the forward under `torch.autocast`."""
    dtype: Annotated[
        Literal["bfloat16", "float16"],
        Choice(
            ("bfloat16", "float16"),
            aliases={"bf16": "bfloat16", "fp16": "float16", "half": "float16"},
        ),
    ] = "bfloat16"
    """What autocast casts eligible operations to. float16 brings the loss scale that the fp16 block describes."""


class DataTypes(Section):
    """Number formats besides the model's own."""

    grad_accum_dtype: Annotated[DType | None, Maybe(DTYPES)] = None
    """In which format gradients are summed over the micro-batches of a step, and reach the optimizer; null means
    fp32."""


DEVICES = Choice(("none", "cpu", "nvme"))
Device = Literal["none", "cpu", "nvme"]


class OffloadOptimizer(Section):
    """Where fp32 masters and optimizer state rest, and are updated. At any stage."""

    device: Annotated[Device, DEVICES] = "none"
    """"none": the training device. "cpu": host memory, as do sharded gradients. "nvme": files, which are mapped into
    memory bucket by bucket; gradients in host memory."""
    nvme_path: Annotated[str | None, Maybe(Text(filled=True))] = None
    """With "nvme": a directory on a local disk. The files in it have no names, so nothing is left of them, however a
    run ends."""
    pin_memory: OnOff = True
    """With "cpu": put masters and gradients in page-locked memory, where the training device is not the CPU."""


class OffloadParam(Section):
    """Where the parameters' shards rest at stage 3."""

    device: Annotated[Device, DEVICES] = "none"
    """"none": the training device. "cpu": host memory. "nvme": files, which are mapped into memory for a gather."""
    nvme_path: Annotated[str | None, Maybe(Text(filled=True))] = None
    """With "nvme": a directory on a local disk, as `offload_optimizer.nvme_path`."""
    pin_memory: OnOff = True
    """With "cpu": page-locked memory, where the training device is not the CPU."""


class ZeroOptimization(Section):
    """What is sharded over the data-parallel ranks."""

    stage: Annotated[
        int,
        Choice((0, 1, 2, 3)),
    ] = 0
    """0: nothing. 1: optimizer state and fp32 masters. 2: gradients too. 3: parameters too."""
    reduce_bucket_size: Annotated[int, Whole(minimum=1, exponent=True)] = 500_000_000
    """Upper bound of the elements reduced in one call. Smaller buckets start sooner and overlap more of the
    backward."""
    blocks: Annotated[tuple[str, ...] | None, Maybe(Names())] = None
    """At stage 3, what is gathered at once: modules of these class names, or whose names match these globs, one
    inside another too. null: the model's repeated blocks, and beside them the layers of plain Sequentials that have
    at least 100 000 elements. What is in none of them stays from its first use to the update: large embeddings and
    heads are worth naming. []: that is everything. It is what a model needs where only some ranks read a block's
    weight past its call, or call, in the first step, what is not called in the order of its definition."""
    stage3_prefetch_bucket_size: Annotated[int, Whole(minimum=0, exponent=True)] = 50_000_000
    """At stage 3, 0: a block is gathered when it is called. Otherwise, whatever the number, while the one before it
    runs."""
    offload_optimizer: OffloadOptimizer = OffloadOptimizer()
    offload_param: OffloadParam = OffloadParam()


class Compile(Section):
    """Compile the model's blocks in place with `torch.compile`, without wrapping anything."""

    enabled: OnOff = False
    """Compile."""
    backend: Annotated[str | Callable[..., Any], Backend()] = "inductor"
    """Name of a `torch.compile` backend, or an import path of one; from Python also a callable."""
    kwargs: Annotated[dict[str, Any], Object()] = {}
    """Further arguments of `torch.compile`, such as `{"mode": "max-autotune", "dynamic": false}`."""
    scope: Annotated[str | tuple[str, ...], Names(keywords=("auto", "module"))] = "auto"
    """"auto": the model's repeated blocks, or the whole module where it has none. "module": the whole module. A
    list: modules of these class names, or whose names match these globs."""


class Checkpoint(Section):
    """How checkpoints are written."""

    keep_last: Annotated[int | None, Maybe(Whole(minimum=1))] = None
    """Keep only this many of the newest checkpoints in a directory; null keeps all."""
    use_node_local_storage: OnOff = False
    """The folder is each node's own (or each rank's): it gets what the ranks that see it hold. A load brings what a
    rank needs from the nodes that have it."""
    async_save: OnOff = False
    """`save_checkpoint` returns once what users may change is copied to host memory; a thread copies the rest before
    the next update, and writes it all beside training; unless the call says otherwise by `blocking`."""
    timeout_seconds: Annotated[float, Real(above=0)] = 120.0
    """How long a rank waits for the others to arrive at a save or a load before it names the missing ones."""


class DataLoader(Section):
    """The loader that `initialize(training_data=...)` builds."""

    shuffle: OnOff = True
    """Draw a new order every epoch."""
    seed: Annotated[int, Whole(minimum=0)] = 1234
    """Seed of the order; the same on every rank."""
    num_workers: Annotated[int, Whole(minimum=0)] = 0
    """Processes that load batches ahead; 0 loads in the training process."""
    pin_memory: OnOff = False
    """Put batches in page-locked memory, from which copies to an accelerator are faster."""


class Pipeline(Section):
    """How a `PipelineModule` is run. It is split where it is built."""

    stages: Annotated[int | None, Maybe(Whole(minimum=1))] = None
    """Into how many stages the module must be split; null means however it is."""
    schedule: Annotated[str | None, Maybe(Text(filled=True))] = None
    """A name ("1f1b", "gpipe", "interleaved", "zero-bubble", "zb-v"), a file with a schedule in it, or its text; null
    means 1f1b; where a stage holds several chunks interleaved, or zb-v where they are placed there and back."""
    activation_checkpoint_interval: Annotated[int, Whole(minimum=0)] = 0
    """Recompute every this many layers in the backward; 0 leaves it to the module."""


class CsvMonitor(Section):
    """One CSV file per value."""

    enabled: OnOff = False
    """Write CSV files."""
    output_path: Annotated[str, Text()] = ""
    """Directory to write below; empty means `csv_monitor` in the working directory."""
    job_name: Annotated[str, Text(filled=True)] = "SheerJobName"
    """Name of the run's own directory in it."""


class TensorBoard(Section):
    """TensorBoard event files (needs the `tensorboard` extra)."""

    enabled: OnOff = False
    """Write event files."""
    output_path: Annotated[str, Text()] = ""
    """Directory to write below; empty means `runs` in the working directory."""
    job_name: Annotated[str, Text(filled=True)] = "SheerJobName"
    """Name of the run's own directory in it."""


class Wandb(Section):
    """Weights & Biases (needs the `wandb` extra)."""

    enabled: OnOff = False
    """Report to Weights & Biases."""
    group: Annotated[str | None, Maybe(Text())] = None
    """Group of the run."""
    team: Annotated[str | None, Maybe(Text())] = None
    """Team (entity) that owns the run."""
    project: Annotated[str, Text(filled=True)] = "sheer"
    """Project of the run."""
