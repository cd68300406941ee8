"""What no single value shows: settings that contradict each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sheer.config.model import Config


def contradictions(config: Config) -> list[str]:
    """One sentence for each pair of settings in `config` that cannot both hold."""
    problems = [*_precision(config), *_class_arguments(config), *_offload(config)]
    if "backend" in config.compile.kwargs:
        problems.append("compile.kwargs.backend: the backend is a key of its own; move it to 'compile.backend'.")
    return problems


def _precision(config: Config) -> list[str]:
    problems = []
    if config.fp16.enabled and config.bf16.enabled:
        problems.append(
            "fp16.enabled and bf16.enabled are both true, but the parameters can have one dtype only. "
            "Set one of them to false (bf16 needs no loss scale)."
        )
    for name, section in (("fp16", config.fp16), ("bf16", config.bf16)):
        if section.enabled and config.torch_autocast.enabled:
            problems.append(
                f"{name}.enabled and torch_autocast.enabled are both true: {name} makes the parameters themselves "
                "16 bits wide, autocast keeps them in fp32 and casts operation by operation. Set one of them to false."
            )
    start = 2.0**config.fp16.initial_scale_power
    if config.fp16.loss_scale == 0 and config.fp16.min_loss_scale > start:
        problems.append(
            f"fp16.min_loss_scale: {config.fp16.min_loss_scale:g} is above the scale that training starts at, "
            f"2**fp16.initial_scale_power = {start:g}. Lower the one or raise the other."
        )
    return problems


def _class_arguments(config: Config) -> list[str]:
    if config.optimizer is not None and "max_grad_norm" in config.optimizer.params:
        return ["optimizer.params.max_grad_norm: gradients are clipped by the top-level key 'gradient_clipping'."]
    return []


def _offload(config: Config) -> list[str]:
    problems = []
    zero = config.zero_optimization
    for name, section in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param)):
        if section.device == "nvme" and section.nvme_path is None:
            problems.append(
                f'zero_optimization.{name}.nvme_path: the device "nvme" needs a directory on a local disk. '
                'Give one, or choose the device "cpu".'
            )
    if zero.offload_param.device != "none" and zero.stage != 3:
        problems.append(
            f"zero_optimization.offload_param.device is {zero.offload_param.device!r}, but parameters are whole on "
            f'every rank at stage {zero.stage}. Set zero_optimization.stage to 3, or the device to "none".'
        )
    return problems
