"""DeepSpeed's keys that no room of Sheer acts on, and what becomes of each: plain data, from 0.19.8 and older files.

A key that only tunes DeepSpeed's internals is accepted and reported. A key that asks for a feature Sheer does not have
is an error, unless its value means "off". So is one that DeepSpeed itself has removed.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

from sheer.config.kinds import Anything, Choice, Flag, Kind, Maybe, Names, Object, Real, Text, Whole


class Fate(Enum):
    """What becomes of a key."""

    ACTS = "acted on"
    """A room of Sheer reads it."""
    TUNES = "accepted, without effect"
    """It tunes DeepSpeed's internals: accepted with the right type, without effect, reported."""
    ABSENT = "refused unless off"
    """It asks for a feature of DeepSpeed that Sheer does not have."""
    REMOVED = "removed by DeepSpeed"
    """DeepSpeed 0.19 refuses it; older files still carry it."""


class Foreign(NamedTuple):
    """One key of DeepSpeed that Sheer does not act on."""

    fate: Fate
    kind: Kind
    about: str
    """TUNES: a sentence saying why it has no effect. Otherwise: the name of the feature, with a mend after a colon."""
    off: tuple[Any, ...] = ()
    """Values that mean "off"; null always does."""
    gated: bool = False
    """The block is also off when its `enabled` is false or absent."""


def _tunes(kind: Kind, why: str) -> Foreign:
    return Foreign(Fate.TUNES, Maybe(kind), why)


def _absent(kind: Kind, feature: str, *, off: tuple[Any, ...]) -> Foreign:
    return Foreign(Fate.ABSENT, Maybe(kind), feature, off)


def _block(feature: str, *, fate: Fate = Fate.ABSENT) -> Foreign:
    """A whole block that DeepSpeed switches by its `enabled`, with whatever it holds."""
    return Foreign(fate, Maybe(Object()), feature, ({},), gated=True)


def _removed(kind: Kind, feature: str, *, off: tuple[Any, ...]) -> Foreign:
    return Foreign(Fate.REMOVED, Maybe(kind), feature, off)


_FLAG = Flag()
_COUNT = Whole(minimum=0, exponent=True)
_ANY_WHOLE = Whole(exponent=True)

_BUCKETS = "Sheer's buckets have one layout, and always overlap their reduction with the backward."
_STAGE3 = "It tunes how DeepSpeed gathers parameters; Sheer gathers one block, and the next one ahead of it."
_SMALL = "A block is gathered in one message, so its small parameters cost none of their own."
_LIVE = "Two blocks are whole at a time, and what is in no block."
_MUON = "It tunes Muon at DeepSpeed's stage 3."
_LEAF = "Whole blocks are gathered; `zero_optimization.blocks` names them."
_SAVING = "A checkpoint holds shards, from which whole tensors are read; engine.full_state_dict gathers them."
_OFFLOAD = "old spelling of offload: use `zero_optimization.%s.device`"
_NVME = "Files are mapped into memory: the kernel reads ahead, writes behind and chooses the sizes."
_RATIO = "update of a part on the device and the rest on the host (Twin-Flow)"
_SPLIT = "The module decides it where it is built: pass it to PipelineModule."
_RAW = "Stages send each other whole tensors; there is no tensor parallelism whose ranks could share them."
_TENSOR_PARALLEL = "It tunes tensor parallelism, which Sheer does not have."
_ZEROPP = "ZeRO++"
_PROFILER = "FLOPS profiler: use torch.profiler"
_DEEPCOMPILE = "DeepCompile passes: Sheer compiles by `compile.enabled`"
_CHECKPOINTING = "activation checkpointing settings: call torch.utils.checkpoint in the model"

_TOP_LEVEL = {
    "$schema": _tunes(Text(), "It tells an editor where the JSON schema is."),
    "zero_allow_untested_optimizer": _tunes(_FLAG, "Sheer shards any torch optimizer; none is tested specially."),
    "zero_force_ds_cpu_optimizer": _tunes(_FLAG, "Sheer always keeps the optimizer that was asked for."),
    "disable_allgather": _tunes(_FLAG, "Sheer gathers updated parameters in one call per bucket."),
    "seq_parallel_communication_data_type": _tunes(Text(), "It tunes sequence parallelism, which Sheer does not have."),
    "vocabulary_size": _tunes(_COUNT, "DeepSpeed only warns with it about unaligned vocabularies."),
    "use_data_before_expert_parallelism": _tunes(_FLAG, "It orders expert-parallel groups, which Sheer does not have."),
    "disable_python_gc": _tunes(_FLAG, "Sheer leaves Python's garbage collector alone."),
    "log_level": _tunes(Text(), 'Set it with logging.getLogger("sheer").setLevel(...).'),
    "managed_gradient_accumulation": _absent(
        _FLAG,
        "unmanaged gradient accumulation: use engine.set_gradient_accumulation_boundary",
        off=(True,),
    ),
    "sequence_parallel_size": _absent(_COUNT, "sequence parallelism", off=(1,)),
    "data_parallel_size": _absent(
        _COUNT,
        "explicit data-parallel size: Sheer takes it from the process group",
        off=(),
    ),
    "wall_clock_breakdown": _absent(_FLAG, "wall-clock breakdown: use torch.profiler", off=(False,)),
    "memory_breakdown": _absent(_FLAG, "memory breakdown: use torch's memory snapshot", off=(False,)),
    "dump_state": _absent(_FLAG, "state dump: use `sheer config explain FILE`", off=(False,)),
    "optimizer.legacy_fusion": _tunes(_FLAG, "It chooses between DeepSpeed's own optimizer kernels."),
}

_PRECISION = {
    "fp16.auto_cast": _tunes(_FLAG, "Sheer never casts a model's inputs; give them in the parameters' dtype."),
    "fp16.fp16_master_weights_and_grads": _absent(_FLAG, "fp16 master weights", off=(False,)),
    "bf16.immediate_grad_update": _tunes(_FLAG, "Sheer accumulates each gradient as soon as it is there."),
    "bf16.bf16_master_weights_and_grads": _absent(_FLAG, "bf16 master weights", off=(False,)),
    "bf16.bf16_optimizer_states": _absent(_FLAG, "bf16 optimizer states", off=(False,)),
    "torch_autocast.lower_precision_safe_modules": _absent(
        Names(), "list of modules to cast: torch.autocast decides by operation", off=()
    ),
    "data_types.param_dtype": _absent(Text(), "parameter dtype: use `bf16` or `fp16`", off=()),
    "data_types.buffer_dtype": _absent(Text(), "buffer dtype: cast buffers in the model", off=()),
    "data_types.keep_in_fp32_modules": _absent(Names(keywords=("auto",)), "fp32 exceptions", off=("auto", [], ())),
    "msamp": _block("MS-AMP"),
}

_ZERO = {
    "contiguous_gradients": _tunes(_FLAG, "Gradients always lie contiguously in their bucket."),
    "reduce_scatter": _tunes(_FLAG, "The collective follows from the stage."),
    "allgather_partitions": _tunes(_FLAG, "Updated parameters are always gathered."),
    "allgather_bucket_size": _tunes(_COUNT, "A bucket is gathered in the size in which it is reduced."),
    "use_multi_rank_bucket_allreduce": _tunes(_FLAG, _BUCKETS),
    "overlap_comm": _tunes(_FLAG, "Reduction always overlaps the backward."),
    "compute_grad_norm": _tunes(_FLAG, "The norm is computed on the device, where nobody waits for it."),
    "load_from_fp32_weights": _tunes(_FLAG, "Masters are always loaded in fp32 where the checkpoint has them."),
    "elastic_checkpoint": _tunes(_FLAG, "Every checkpoint of Sheer loads at any number of ranks."),
    "round_robin_gradients": _tunes(_FLAG, _BUCKETS),
    "parameter_alignment": _tunes(Anything(), "Every parameter is aligned in its bucket."),
    "ignore_unused_parameters": _tunes(_FLAG, "Parameters without a gradient always work."),
    "legacy_stage1": _absent(_FLAG, "old implementation of stage 1", off=(False,)),
    "prefetch_bucket_size": _tunes(_COUNT, "Only `zero_optimization.stage3_prefetch_bucket_size` is read."),
    "sub_group_size": _tunes(_COUNT, "Each bucket is updated by one call, whatever its size."),
    "enable_sanity_checks": _tunes(_FLAG, "Sheer's checks are always on."),
    "memory_efficient_linear": _tunes(_FLAG, _STAGE3),
    "override_module_apply": _tunes(_FLAG, _STAGE3),
    "pipeline_loading_checkpoint": _tunes(_FLAG, _STAGE3),
    "log_trace_cache_warnings": _tunes(_FLAG, _STAGE3),
    "leaf_module.classes": _tunes(Names(), _LEAF),
    "leaf_module.names": _tunes(Names(), _LEAF),
    "leaf_module.name_suffixes": _tunes(Names(), _LEAF),
    "save_muon_momentum_buffer_in_memory": _tunes(_FLAG, _MUON),
    "zero_hpz_partition_size": _absent(_COUNT, f"{_ZEROPP} secondary partition", off=(1,)),
    "zero_quantized_weights": _absent(_FLAG, f"{_ZEROPP} quantized weights", off=(False,)),
    "zero_quantized_nontrainable_weights": _absent(_FLAG, f"{_ZEROPP} quantized weights", off=(False,)),
    "zero_quantized_gradients": _absent(_FLAG, f"{_ZEROPP} quantized gradients", off=(False,)),
    "zenflow": _absent(Object(), "ZenFlow", off=()),
    "cpu_offload": _absent(_FLAG, _OFFLOAD % "offload_optimizer", off=(False,)),
    "cpu_offload_param": _absent(_FLAG, _OFFLOAD % "offload_param", off=(False,)),
    "cpu_offload_use_pin_memory": _tunes(_FLAG, "`zero_optimization.offload_optimizer.pin_memory` decides it."),
    "stage3_gather_fp16_weights_on_model_save": _tunes(_FLAG, _SAVING),
    "offload_param.buffer_count": _tunes(_COUNT, _NVME),
    "offload_param.buffer_size": _tunes(_COUNT, _NVME),
    "offload_param.max_in_cpu": _tunes(_COUNT, "All of them rest where `device` says."),
    "offload_optimizer.buffer_count": _tunes(_COUNT, _NVME),
    "offload_optimizer.pipeline_read": _tunes(_FLAG, _NVME),
    "offload_optimizer.pipeline_write": _tunes(_FLAG, _NVME),
    "offload_optimizer.fast_init": _tunes(_FLAG, _NVME),
    "offload_optimizer.ratio": _absent(Real(minimum=0), _RATIO, off=(1, 1.0)),
    "offload_optimizer.super_offload": _absent(_FLAG, "SuperOffload", off=(False,)),
    "offload_optimizer.cpuadam_cores_perc": _tunes(Real(minimum=0), "torch.set_num_threads decides it."),
    "mics_shard_size": _removed(_ANY_WHOLE, "MiCS", off=(-1,)),
    "mics_hierarchical_params_gather": _removed(_FLAG, "MiCS", off=(False,)),
    "zeropp_loco_param": _removed(Object(), "LoCo-ZeRO++", off=({},)),
}

_STAGE3_WHY = {
    "param_persistence_threshold": _SMALL,
    "model_persistence_threshold": _SMALL,
    "max_live_parameters": _LIVE,
    "max_reuse_distance": _LIVE,
    "gather_16bit_weights_on_model_save": _SAVING,
}

# DeepSpeed accepts each of these with and without the prefix "stage3_".
_STAGE3_KINDS = {
    "param_persistence_threshold": _COUNT,
    "model_persistence_threshold": _COUNT,
    "max_live_parameters": _COUNT,
    "max_reuse_distance": _COUNT,
    "gather_16bit_weights_on_model_save": _FLAG,
    "module_granularity_threshold": _COUNT,
    "use_all_reduce_for_fetch_params": _FLAG,
    "allgather_sequential": _FLAG,
}

_AIO_KINDS = {
    "block_size": _COUNT,
    "queue_depth": _COUNT,
    "intra_op_parallelism": _COUNT,
    "thread_count": _COUNT,
    "single_submit": _FLAG,
    "overlap_events": _FLAG,
    "use_gds": _FLAG,
}

_BLOCKS = {
    "activation_checkpointing.partition_activations": _absent(_FLAG, _CHECKPOINTING, off=(False,)),
    "activation_checkpointing.number_checkpoints": _tunes(_COUNT, "It sizes DeepSpeed's contiguous buffers."),
    "activation_checkpointing.contiguous_memory_optimization": _absent(_FLAG, _CHECKPOINTING, off=(False,)),
    "activation_checkpointing.cpu_checkpointing": _absent(_FLAG, _CHECKPOINTING, off=(False,)),
    "activation_checkpointing.synchronize_checkpoint_boundary": _absent(_FLAG, _CHECKPOINTING, off=(False,)),
    "activation_checkpointing.profile": _absent(_FLAG, _CHECKPOINTING, off=(False,)),
    "checkpoint.tag_validation": _tunes(
        Choice(
            ("Warn", "Ignore", "Fail"),
            aliases={"WARN": "Warn", "IGNORE": "Ignore", "FAIL": "Fail"}
            | {"warn": "Warn", "ignore": "Ignore", "fail": "Fail"},
        ),
        "Ranks that ask for different tags always get an error: a checkpoint has one.",
    ),
    "checkpoint.load_universal": _absent(
        _FLAG,
        "universal checkpoint format: every checkpoint of Sheer loads at any number of ranks",
        off=(False,),
    ),
    "checkpoint.parallel_write.pipeline_stage": _tunes(_FLAG, "Every rank writes its own pieces."),
    "checkpoint.checkpoint_serialization": _tunes(_FLAG, "Sheer writes safetensors."),
    "checkpoint.writer": _tunes(Object(), "Sheer has one writer; for `decoupled` saves set checkpoint.async_save."),
    "pipeline.partition": _tunes(Text(), _SPLIT),
    "pipeline.seed_layers": _tunes(_FLAG, _SPLIT),
    "pipeline.pipe_partitioned": _tunes(_FLAG, _RAW),
    "pipeline.grad_partitioned": _tunes(_FLAG, _RAW),
    "pipeline.use_reentrant": _tunes(_FLAG, "Layers are recomputed by torch's non-reentrant checkpoint."),
    "tensor_parallel.autotp_size": _absent(_COUNT, "tensor parallelism", off=(0, 1)),
    "tensor_parallel.tp.tp_size": _absent(_COUNT, "tensor parallelism", off=(0, 1)),
    "tensor_parallel.tp.tp_grain_size": _tunes(_COUNT, _TENSOR_PARALLEL),
    "tensor_parallel.dtype": _tunes(Text(), _TENSOR_PARALLEL),
    "tensor_parallel.tp_overlap_comm": _tunes(_FLAG, _TENSOR_PARALLEL),
    "tensor_parallel.preset_model": _tunes(Text(), _TENSOR_PARALLEL),
    "tensor_parallel.partition_config": _tunes(Object(), _TENSOR_PARALLEL),
    "tensor_parallel.vocab_parallel_lm_head": _tunes(Anything(), _TENSOR_PARALLEL),
    "tensor_parallel.vocab_parallel_ce_backend": _tunes(Text(), _TENSOR_PARALLEL),
    "inference.tensor_parallel.tp_size": _absent(_COUNT, "tensor-parallel inference", off=(0, 1)),
    "compile.deepcompile": _absent(_FLAG, _DEEPCOMPILE, off=(False,)),
    "compile.passes": _absent(Names(), _DEEPCOMPILE, off=([], ())),
    "compile.offload_parameters": _absent(_FLAG, _DEEPCOMPILE, off=(False,)),
    "compile.offload_activation": _absent(_FLAG, _DEEPCOMPILE, off=(False,)),
    "compile.offload_opt_states": _absent(_FLAG, _DEEPCOMPILE, off=(False,)),
    "flops_profiler.enabled": _absent(_FLAG, _PROFILER, off=(False,)),
    "flops_profiler.recompute_fwd_factor": _tunes(Real(minimum=0), "It tunes the FLOPS profiler, which is off."),
    "flops_profiler.profile_step": _tunes(_COUNT, "It tunes the FLOPS profiler, which is off."),
    "flops_profiler.module_depth": _tunes(_ANY_WHOLE, "It tunes the FLOPS profiler, which is off."),
    "flops_profiler.top_modules": _tunes(_COUNT, "It tunes the FLOPS profiler, which is off."),
    "flops_profiler.detailed": _tunes(_FLAG, "It tunes the FLOPS profiler, which is off."),
    "flops_profiler.output_file": _tunes(Text(), "It tunes the FLOPS profiler, which is off."),
    "comms_logger.enabled": _absent(_FLAG, "communication logger: use torch.profiler", off=(False,)),
    "comms_logger.verbose": _tunes(_FLAG, "It tunes the communication logger, which is off."),
    "comms_logger.prof_all": _tunes(_FLAG, "It tunes the communication logger, which is off."),
    "comms_logger.debug": _tunes(_FLAG, "It tunes the communication logger, which is off."),
    "comms_logger.prof_ops": _tunes(Names(), "It tunes the communication logger, which is off."),
    "timers.throughput.enabled": _tunes(_FLAG, "Throughput is measured by whoever shows it."),
    "timers.throughput.synchronized": _tunes(_FLAG, "Throughput is measured by whoever shows it."),
    "comet": _block("Comet monitor"),
    "data_efficiency": _block("data efficiency library"),
    "hybrid_engine": _block("hybrid engine"),
    "autotuning": _block("autotuner"),
    "expert_parallel": _block("expert parallelism"),
    "weight_quantization": _absent(Object(), "weight quantization", off=({},)),
    "datastates_ckpt": _absent(Object(), "DataStates checkpoint engine: set checkpoint.async_save", off=({},)),
}

# DeepCompile's own switches; without `compile.deepcompile` they do nothing in DeepSpeed either.
_DEEPCOMPILE_SWITCHES = (
    "double_buffer",
    "free_activation",
    "symmetric_memory",
    "debug_log",
    "sync_before_reduce",
    "sync_after_reduce",
    "sync_before_allgather",
    "sync_after_allgather",
    "keep_int_input_tensors",
    "keep_all_input_tensors",
)

_REMOVED = {
    "amp": _block("Apex AMP: use `bf16`, `fp16` or `torch_autocast`", fate=Fate.REMOVED),
    "nebula": _block("Nebula checkpoint engine: set checkpoint.async_save", fate=Fate.REMOVED),
    "elasticity": _block("elasticity: a checkpoint of Sheer loads at any number of ranks", fate=Fate.REMOVED),
    "eigenvalue": _block("eigenvalue estimation (MoQ)", fate=Fate.REMOVED),
    "curriculum_learning": _block("legacy curriculum learning", fate=Fate.REMOVED),
    "progressive_layer_drop": _block("progressive layer drop", fate=Fate.REMOVED),
    "quantize_training": _block("quantized training (MoQ)", fate=Fate.REMOVED),
    "compression_training": _removed(Object(), "compression library", off=({},)),
    "sparse_attention": _removed(Object(), "sparse attention", off=({},)),
    "sparse_gradients": _removed(_FLAG, "sparse gradients", off=(False,)),
    "graph_harvesting": _removed(_FLAG, "graph harvesting", off=(False,)),
    "fp32_allreduce": _removed(_FLAG, "fp32 all-reduce: use `communication_data_type`", off=(False,)),
}

FOREIGN: dict[str, Foreign] = (
    _TOP_LEVEL
    | _PRECISION
    | {f"zero_optimization.{name}": entry for name, entry in _ZERO.items()}
    | {
        f"zero_optimization.{name}": _tunes(kind, _STAGE3_WHY.get(name, _STAGE3))
        for name, kind in _STAGE3_KINDS.items()
    }
    | {
        f"zero_optimization.stage3_{name}": _tunes(kind, _STAGE3_WHY.get(name, _STAGE3))
        for name, kind in _STAGE3_KINDS.items()
    }
    | {f"aio.{name}": _tunes(kind, _NVME) for name, kind in _AIO_KINDS.items()}
    | _BLOCKS
    | {f"compile.{name}": _tunes(_FLAG, "It tunes DeepCompile, which is off.") for name in _DEEPCOMPILE_SWITCHES}
    | _REMOVED
)
"""Every DeepSpeed key that no room acts on, by dotted path. A path whose kind is an object stands for all below it."""

ALIASES = {"bfloat16": "bf16"}
"""Other names of blocks, as DeepSpeed accepts them."""

AUTO = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "optimizer.params.*",
        "scheduler.params.*",
        "fp16.enabled",
        "fp16.auto_cast",
        "bf16.enabled",
        "pipeline.stages",
        "zero_optimization.stage",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.allgather_bucket_size",
        "zero_optimization.sub_group_size",
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_optimizer.nvme_path",
        "zero_optimization.offload_param.device",
        "zero_optimization.offload_param.nvme_path",
    }
    | {f"zero_optimization.stage3_{name}" for name in ("prefetch_bucket_size", *_STAGE3_KINDS)}
)
"""Where DeepSpeed and its integrations (transformers, accelerate) write "auto"; a star stands for one name."""


class Difference(NamedTuple):
    """A default of Sheer that is not DeepSpeed's."""

    ours: str
    theirs: str
    why: str


DIFFERENCES = {
    "gradient_clipping": Difference("0.0 (off)", "1.0", "PyTorch clips only when asked to."),
    "optimizer.type": Difference(
        '"Adam" is Adam', '"Adam" is AdamW unless params.adam_w_mode is false', "A name should build what it names."
    ),
    "bf16.check_grad_overflow": Difference(
        "false", "true", "bfloat16 has the range of fp32; PyTorch never skips a step there."
    ),
    "data_types.grad_accum_dtype": Difference(
        "null (fp32)", "null (the model's dtype)", "Sums over micro-batches in 16 bits lose small gradients."
    ),
    "torch_autocast.dtype": Difference("bfloat16", "null", "autocast needs a dtype, and bfloat16 needs no loss scale."),
    "csv_monitor.job_name": Difference("SheerJobName", "DeepSpeedJobName", "It is a run of Sheer."),
    "tensorboard.job_name": Difference("SheerJobName", "DeepSpeedJobName", "It is a run of Sheer."),
    "wandb.project": Difference("sheer", "deepspeed", "It is a run of Sheer."),
}
"""Defaults that differ from DeepSpeed's, by dotted path."""
