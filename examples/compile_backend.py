"""A compiler backend of your own, by import path: it counts the operations of each block, rewrites one, and runs them.

    python compile_backend.py

Sheer hands a backend exactly what `torch.compile` would: one `torch.fx` graph per kind of block, of the block's own
forward and nothing else. No hook, gather, scaling or bookkeeping of the engine is in it, so a graph pass sees the same
graph at every ZeRO stage and world size.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

import sheer
from gpt import GPT, GPTConfig

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "compile": {"enabled": True, "backend": "compile_backend.counting"},
}


def operations(graph_module: fx.GraphModule) -> collections.Counter[str]:
    """How often each operation is in the graph."""
    nodes = [node for node in graph_module.graph.nodes if node.op in ("call_function", "call_method")]
    return collections.Counter(getattr(node.target, "__name__", str(node.target)) for node in nodes)


def drop_additions_of_zero(graph_module: fx.GraphModule) -> int:
    """A graph pass: `x + 0` becomes `x`. Gives how many there were."""
    dropped = 0
    for node in list(graph_module.graph.nodes):
        if getattr(node.target, "__name__", "") in ("add", "iadd") and node.args[1:] == (0,):
            node.replace_all_uses_with(node.args[0])
            graph_module.graph.erase_node(node)
            dropped += 1
    graph_module.recompile()
    return dropped


def counting(graph_module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """The backend: what it gives is called in the place of the block's forward."""
    dropped = drop_additions_of_zero(graph_module)
    found = operations(graph_module)
    names = ", ".join(f"{count} {name}" for name, count in found.most_common())
    print(f"a graph of {found.total()} operations, {dropped} dropped: {names}")
    return graph_module.forward


def main() -> None:
    """Two steps of the example GPT; its four blocks are alike, so one graph is printed."""
    torch.manual_seed(0)
    engine = sheer.initialize(model=GPT(GPTConfig(layers=4)), config=CONFIG)[0]
    tokens = torch.randint(0, 256, (4, 65))
    for _ in range(2):
        loss = engine(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        engine.backward(loss)
        engine.step()
    print(engine.compile_report)
    engine.destroy()


if __name__ == "__main__":
    main()
