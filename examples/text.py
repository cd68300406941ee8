"""Text to train on: the source of the Python standard library, which every Python carries. Plain PyTorch."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class Corpus(NamedTuple):
    """Two texts as uint8 tensors, one element per byte."""

    train: Tensor
    validation: Tensor


def standard_library() -> Corpus:
    """The .py files of the running Python in sorted order, without its tests; every 20th file is for validation."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in root.rglob("*.py") if not SKIPPED & set(path.relative_to(root).parts)]
    texts = [path.read_bytes() for path in sorted(files)]
    if len(texts) < 20:
        raise FileNotFoundError(
            f"expected the source of the Python standard library under {root}, found {len(texts)} files"
        )
    train = b"".join(text for index, text in enumerate(texts) if index % 20 != 19)
    validation = b"".join(texts[19::20])
    return Corpus(_as_tensor(train), _as_tensor(validation))


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class Windows(Dataset[dict[str, Tensor]]):
    """A text cut into windows: `tokens` and `targets` (the byte after each token), both int64 of [context]."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text = text
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        window = self.text[index * self.context : (index + 1) * self.context + 1].long()
        return {"tokens": window[:-1], "targets": window[1:]}
