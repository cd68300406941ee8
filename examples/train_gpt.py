"""Train the byte-level GPT with Sheer: the script to copy.

    python train_gpt.py                             one process, no launcher
    torchrun --nproc-per-node 2 train_gpt.py        two processes, the optimizer and the gradients sharded (ZeRO-2)

Run it again and it goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import sheer
from gpt import GPT, GPTConfig
from text import Windows, standard_library

CONFIG = {
    "train_batch_size": 16,  # sequences per step, over all processes
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 50}},
    "zero_optimization": {"stage": 2},
    # "bf16": {"enabled": True},       masters, moments and gradient sums stay fp32
    # "compile": {"enabled": True},    compiles the blocks in place; needs a C++ compiler on a CPU
}


def main() -> None:
    """Train for `--steps` steps, saving every 50."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("checkpoints"))
    args = parser.parse_args()

    torch.manual_seed(0)
    model = GPT(GPTConfig())
    data = Windows(standard_library().train, model.config.context)
    engine, _, loader, _ = sheer.initialize(model=model, config=CONFIG, training_data=data)
    if (args.out / "latest").exists():
        engine.load_checkpoint(args.out)
        if engine.rank == 0:
            print(f"going on from step {engine.global_steps} in {args.out}; --steps is {args.steps}")

    while engine.global_steps < args.steps:
        for batch in loader:
            loss = engine(**batch)
            engine.backward(loss)
            result = engine.step()
            if engine.rank == 0 and result and result.step % 10 == 0:
                print(f"step {result.step:4d}  loss {loss.item():.3f}  grad norm {result.grad_norm:.2f}")
            if engine.global_steps % 50 == 0 or engine.global_steps >= args.steps:
                engine.save_checkpoint(args.out)
            if engine.global_steps >= args.steps:
                break
    engine.destroy()


if __name__ == "__main__":
    main()
