"""Every key of DeepSpeed is classified, and the files that its integrations write are accepted."""

from __future__ import annotations

from typing import Any

import pytest

from sheer.config import Config
from sheer.config.foreign import ALIASES, AUTO, DIFFERENCES, FOREIGN, Fate
from sheer.errors import ConfigError

# The keys of DeepSpeed 0.19.8 and of older files, block by block ("" is the top level).
SURFACE: dict[str, str] = {
    "": """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation
        gradient_clipping steps_per_print prescale_gradients gradient_predivide_factor gradient_allreduce_op
        communication_data_type seq_parallel_communication_data_type disable_allgather zero_allow_untested_optimizer
        zero_force_ds_cpu_optimizer dataloader_drop_last wall_clock_breakdown memory_breakdown dump_state
        disable_python_gc log_level vocabulary_size use_data_before_expert_parallelism sequence_parallel_size
        data_parallel_size hybrid_engine autotuning expert_parallel weight_quantization datastates_ckpt
        nebula compression_training amp quantize_training sparse_gradients eigenvalue sparse_attention elasticity
        graph_harvesting curriculum_learning progressive_layer_drop""",
    "optimizer": "type params legacy_fusion",
    "scheduler": "type params",
    "fp16": """enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis
        min_loss_scale fp16_master_weights_and_grads""",
    "bf16": """enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads
        bf16_optimizer_states""",
    "torch_autocast": "enabled dtype lower_precision_safe_modules",
    "data_types": "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules",
    "zero_optimization": """stage contiguous_gradients reduce_scatter reduce_bucket_size allgather_partitions
        allgather_bucket_size use_multi_rank_bucket_allreduce overlap_comm compute_grad_norm load_from_fp32_weights
        elastic_checkpoint round_robin_gradients parameter_alignment ignore_unused_parameters legacy_stage1
        sub_group_size enable_sanity_checks stage3_prefetch_bucket_size stage3_param_persistence_threshold
        stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance
        stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold
        stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential prefetch_bucket_size
        param_persistence_threshold model_persistence_threshold max_live_parameters max_reuse_distance
        gather_16bit_weights_on_model_save module_granularity_threshold use_all_reduce_for_fetch_params
        allgather_sequential memory_efficient_linear override_module_apply pipeline_loading_checkpoint
        log_trace_cache_warnings zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights
        zero_quantized_gradients save_muon_momentum_buffer_in_memory zenflow cpu_offload cpu_offload_param
        cpu_offload_use_pin_memory stage3_gather_fp16_weights_on_model_save mics_shard_size
        mics_hierarchical_params_gather zeropp_loco_param""",
    "zero_optimization.leaf_module": "classes names name_suffixes",
    "zero_optimization.offload_param": "device nvme_path buffer_count buffer_size max_in_cpu pin_memory",
    "zero_optimization.offload_optimizer": """device nvme_path buffer_count pin_memory pipeline_read pipeline_write
        fast_init ratio super_offload cpuadam_cores_perc""",
    "aio": "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds thread_count",
    "activation_checkpointing": """partition_activations number_checkpoints contiguous_memory_optimization
        cpu_checkpointing synchronize_checkpoint_boundary profile""",
    "checkpoint": "tag_validation load_universal use_node_local_storage checkpoint_serialization writer",
    "checkpoint.parallel_write": "pipeline_stage",
    "checkpoint.writer": """type io_buffer_size io_buffer_double show_statistics data_parallel decoupled
        io_multiplier""",
    "pipeline": """stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned
        use_reentrant""",
    "tensor_parallel": """autotp_size dtype tp_overlap_comm preset_model partition_config vocab_parallel_lm_head
        vocab_parallel_ce_backend""",
    "tensor_parallel.tp": "tp_size tp_grain_size",
    "compile": """enabled backend kwargs deepcompile passes offload_parameters offload_activation offload_opt_states
        double_buffer free_activation""",
    "flops_profiler": "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
    "tensorboard": "enabled output_path job_name",
    "csv_monitor": "enabled output_path job_name",
    "wandb": "enabled group team project",
    "comet": "enabled output_path job_name",
    "comms_logger": "enabled verbose prof_all debug prof_ops",
    "timers.throughput": "enabled synchronized",
    "data_efficiency": "enabled seed data_sampling data_routing",
    "msamp": "enabled opt_level",
    "inference.tensor_parallel": "tp_size",
}
KEYS = [f"{block}.{name}".lstrip(".") for block, names in SURFACE.items() for name in names.split()]


@pytest.mark.parametrize("key", KEYS)
def test_every_key_of_deepspeed_is_classified(key: str) -> None:
    entries = Config.catalogue().entries
    names = key.split(".")
    places = [".".join(names[:depth]) for depth in range(1, len(names) + 1)]
    assert sum(place in entries for place in places) == 1


# Value by value: DeepSpeed's own defaults mean "nothing asked for", so a file that spells them out is accepted.
DEFAULTS: dict[str, Any] = {
    "managed_gradient_accumulation": True,
    "wall_clock_breakdown": False,
    "zero_force_ds_cpu_optimizer": True,
    "disable_allgather": False,
    "fp16": {"auto_cast": False, "fp16_master_weights_and_grads": False, "loss_scale": 0, "min_loss_scale": 1},
    "bf16": {"immediate_grad_update": False, "bf16_optimizer_states": False},
    "torch_autocast": {"lower_precision_safe_modules": None},
    "data_types": {"param_dtype": None, "keep_in_fp32_modules": "auto"},
    "zero_optimization": {
        "overlap_comm": None,
        "legacy_stage1": False,
        "sub_group_size": 1e9,
        "stage3_model_persistence_threshold": 2**63 - 1,
        "zero_hpz_partition_size": 1,
        "zenflow": None,
        "mics_shard_size": -1,
        "leaf_module": {"classes": ["a.B"], "names": [], "name_suffixes": []},
        "offload_param": {"device": "none", "nvme_path": None, "buffer_size": 1e8},
        "offload_optimizer": {"device": "none", "ratio": 1.0, "super_offload": False, "cpuadam_cores_perc": 0.8},
    },
    "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None, "profile": False},
    "checkpoint": {"load_universal": False, "parallel_write": {"pipeline_stage": False}, "writer": None},
    "pipeline": {"stages": "auto", "partition": "best", "seed_layers": False},
    "tensor_parallel": {"autotp_size": 0, "dtype": "fp16", "tp": {"tp_size": 1, "tp_grain_size": 1}},
    "compile": {"deepcompile": False, "passes": None, "double_buffer": True},
    "flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1, "output_file": None},
    "comms_logger": {"enabled": False, "prof_ops": []},
    "comet": {"enabled": False},
    "timers": {"throughput": {"enabled": True, "synchronized": True}},
    "data_efficiency": {"enabled": False, "seed": 1234, "data_sampling": {"enabled": False}},
    "sequence_parallel_size": None,
}


def test_deepspeeds_defaults_spelled_out_are_accepted_and_listed() -> None:
    config = Config.load(DEFAULTS)
    assert "zero_optimization.offload_optimizer.pipeline_read" not in config.without_effect
    assert config.zero_optimization.offload_optimizer.device == "none"
    assert config.without_effect["zero_optimization.sub_group_size"].startswith("without effect: ")
    assert all(sentence.endswith(".") for sentence in config.without_effect.values())


INTEGRATIONS: dict[str, dict[str, Any]] = {
    "accelerate": {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "steps_per_print": float("inf"),
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "none", "nvme_path": None},
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        "zero_allow_untested_optimizer": True,
        "fp16": {"enabled": False, "auto_cast": True},
        "bf16": {"enabled": True},
        "msamp": {"enabled": False, "opt_level": "O1"},
    },
    "transformers": {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
            },
        },
        "fp16": {"enabled": "auto", "initial_scale_power": 32, "min_loss_scale": 0.00001},
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 2,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "allgather_bucket_size": 2e8,
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
        "checkpoint": {"use_node_local_storage": False},
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    },
    "lightning": {
        "activation_checkpointing": {
            "partition_activations": False,
            "cpu_checkpointing": False,
            "contiguous_memory_optimization": False,
            "synchronize_checkpoint_boundary": False,
        },
        "aio": {
            "block_size": 1048576,
            "queue_depth": 8,
            "single_submit": False,
            "overlap_events": True,
            "thread_count": 1,
        },
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 2,
            "contiguous_gradients": True,
            "overlap_comm": True,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 200_000_000,
            "reduce_bucket_size": 200_000_000,
            "sub_group_size": 1_000_000_000_000,
        },
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
    },
}


@pytest.mark.parametrize("client", INTEGRATIONS)
def test_what_the_integrations_write_is_accepted(client: str) -> None:
    config = Config.load(INTEGRATIONS[client])
    assert config.zero_optimization.stage == 2
    assert config.raw == INTEGRATIONS[client]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"zero_optimization": {"offload_optimizer": {"super_offload": True}}},
            r"^config: 1 problem:\n  - zero_optimization\.offload_optimizer\.super_offload: true asks for DeepSpeed's "
            r"SuperOffload, which Sheer does not have\. Remove it or set it to false\.$",
        ),
        ({"zero_optimization": {"cpu_offload": True}}, r"use `zero_optimization\.offload_optimizer\.device`"),
        ({"zero_optimization": {"offload_optimizer": {"ratio": 0.5}}}, r"ratio: 0\.5 .*Twin-Flow.* to 1\."),
        ({"flops_profiler": {"enabled": True}}, r"flops_profiler\.enabled: true .* Instead, use torch\.profiler\."),
        ({"autotuning": {"enabled": True}}, r'autotuning: .* set it to \{"enabled": false\}\.'),
        ({"autotuning": {"enabled": "no"}}, r"autotuning: .* asks for DeepSpeed's autotuner"),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, r"zero_hpz_partition_size: 8 .* ZeRO\+\+.* to 1\."),
        ({"tensor_parallel": {"autotp_size": 2}}, r"tensor_parallel\.autotp_size: 2 .* tensor parallelism"),
        ({"data_types": {"param_dtype": "bf16"}}, r"data_types\.param_dtype: .* set it to null\. Instead, use `bf16`"),
        ({"amp": {"enabled": True}}, r"amp: .* Apex AMP, which DeepSpeed itself has removed\. Remove it\."),
        ({"sparse_gradients": True}, r"sparse_gradients: true .* which DeepSpeed itself has removed"),
        ({"zero_optimization": {"mics_shard_size": 4}}, r"mics_shard_size: 4 .* which DeepSpeed itself has removed"),
        ({"zero_optimization": {"overlap_comm": "yes"}}, r"overlap_comm: must be true or false, or null"),
        ({"aio": {"block_size": True}}, r"aio\.block_size: must be an integer of at least 0, or null, not true"),
        ({"aio": 3}, r"aio: must be an object"),
        ({"aio": {"blok_size": 3}}, r"aio\.blok_size: unknown key in 'aio'\. Did you mean 'block_size'\?"),
        ({"fp32_allreduce": True}, r"fp32_allreduce: .* Instead, use `communication_data_type`\."),
    ],
)
def test_what_sheer_does_not_have_is_named_as_deepspeeds(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Config.load(given)


@pytest.mark.parametrize("key", [path for path, entry in FOREIGN.items() if entry.fate is Fate.REMOVED])
def test_what_deepspeed_removed_may_still_be_off(key: str) -> None:
    block, _, name = key.rpartition(".")
    for off in (None, *FOREIGN[key].off):
        given = {block: {name: off}} if block else {name: off}
        assert key in Config.load(given).without_effect


def test_the_tables_speak_of_keys_that_exist() -> None:
    catalogue = Config.catalogue()
    assert set(DIFFERENCES) <= set(catalogue.entries)
    assert {path.removesuffix(".*") for path in AUTO} <= set(catalogue.entries)
    assert set(ALIASES.values()) <= set(catalogue.blocks)
    acted_on = [path for path, entry in catalogue.entries.items() if entry.fate is Fate.ACTS]
    assert not set(acted_on) & set(FOREIGN)


@pytest.mark.parametrize("path", FOREIGN)
def test_off_values_are_of_the_keys_kind_and_every_reason_is_said(path: str) -> None:
    foreign = FOREIGN[path]
    assert foreign.about
    assert foreign.about.endswith(".") == (foreign.fate is Fate.TUNES)
    assert bool(foreign.off) <= (foreign.fate is not Fate.TUNES)
    assert all(foreign.kind.accepts(off) for off in foreign.off)
