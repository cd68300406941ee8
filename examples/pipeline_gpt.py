"""Train the byte-level GPT by pipeline: the script to copy.

    torchrun --nproc-per-node 2 pipeline_gpt.py                 two stages
    torchrun --nproc-per-node 4 pipeline_gpt.py                 two stages, each on two data-parallel ranks
    torchrun --nproc-per-node 2 pipeline_gpt.py --from-layers   the same model written as a list of layers
    python pipeline_gpt.py --stages 1                           one stage: plain gradient accumulation

Checkpoints know nothing of stages: go on with another `--stages`, or, but for `--from-layers`, with the plain model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import sheer
from gpt import GPT, Block, GPTConfig
from text import Windows, standard_library

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 8,  # micro-batches in a step: the more, the smaller the share of idle time
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "zero_optimization": {"stage": 1},
}


class Start(nn.Module):
    """Tokens [batch, time] to [batch, time, width]: what comes before the first block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        for table in (self.embed, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """The sum of both embeddings."""
        return self.embed(tokens) + self.position.weight[: tokens.shape[1]]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all tokens, in nats."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def cut(config: GPTConfig, **where: int) -> sheer.PipelineModule:
    """The plain model, cut at its blocks; it makes its own loss from `targets`."""
    return sheer.PipelineModule.from_module(GPT(config), blocks="blocks.*", **where)


def listed(config: GPTConfig, **where: int) -> sheer.PipelineModule:
    """The same as a list of layers, each built on its own stage only. The output layer is tied to the embedding."""
    layers = [
        sheer.TiedLayerSpec("embed", Start, config, tied_weight_attr="embed.weight"),
        *[sheer.LayerSpec(Block, config) for _ in range(config.layers)],
        sheer.LayerSpec(nn.LayerNorm, config.width),
        sheer.TiedLayerSpec("embed", nn.Linear, config.width, config.vocabulary, bias=False),
    ]
    return sheer.PipelineModule(layers, loss_fn=cross_entropy, **where)


def main() -> None:
    """Train for `--steps` steps, saving at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--from-layers", action="store_true")
    parser.add_argument("--out", type=Path, help="default: pipeline-checkpoints; layers-checkpoints with --from-layers")
    args = parser.parse_args()
    out = args.out or Path("layers-checkpoints" if args.from_layers else "pipeline-checkpoints")

    torch.manual_seed(0)
    config = GPTConfig()
    module = (listed if args.from_layers else cut)(config, num_stages=args.stages)
    data = Windows(standard_library().train, config.context)
    engine, _, loader, _ = sheer.initialize(model=module, config=CONFIG, training_data=data)
    engine.set_batch_fn(lambda batch: (batch["tokens"], batch["targets"]))
    if (out / "latest").exists():
        engine.load_checkpoint(out)

    batches = iter(sheer.RepeatingLoader(loader))
    while engine.global_steps < args.steps:
        loss = engine.train_batch(batches)
        if engine.rank == 0 and engine.global_steps % 10 == 0:
            print(f"step {engine.global_steps:4d}  loss {loss.item():.3f}")
    engine.save_checkpoint(out)
    engine.destroy()


if __name__ == "__main__":
    main()
