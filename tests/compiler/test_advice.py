"""Guards in plain words. The first half are made by torch here, so that a change of its wording shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sheer.compiler.advice import Guard, explain
from tests.compiler.models import compiled

X = torch.ones(2, 4)
Change = Callable[[nn.Module], object]


class Sensitive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.inner = nn.ModuleList([nn.Linear(4, 4)])
        self.number = 0
        self.table = {"a": 1}

    def forward(self, x: torch.Tensor, mask: Any = None, k: int = 1) -> torch.Tensor:
        y = self.layer(x)
        for module in self.inner:
            y = module(y)
        if self.training:
            y = y * 2
        if mask is not None:
            y = y * mask
        return y * k * self.table["a"] + self.number


def _call(*args: Any, **kwargs: Any) -> Change:
    return lambda module: module(*args, **kwargs)


def _set(name: str, value: Any) -> Change:
    return lambda module: (setattr(module, name, value), module(X))


def _autocast(module: nn.Module) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module(X)


def _append(module: nn.Module) -> None:
    module.inner.append(nn.Linear(4, 4))
    module(X)


def _to_double(module: nn.Module) -> None:
    module.double()(X.double())


@pytest.mark.parametrize(
    ("change", "words", "mend"),
    [
        (_call(torch.ones(3, 4)), "size of `x` at dimension 0 was 2 and is now 3", "dynamic"),
        (_call(torch.ones(1, 4)), "is now 1", "batches of one"),
        (_call(torch.ones(2, 2, 4)), "`x` had 2 dimensions and now has 3", "one form"),
        (_call(torch.ones(4, 2).t()), "in memory in another order", "contiguous"),
        (_call(X.clone().requires_grad_()), "`x` needs a gradient", "Two graphs"),
        (_to_double, "Float and is now Double", "Cast"),
        (_autocast, "Autocast", "every call"),
        (lambda module: module.eval()(X), "train() to eval()", "Two graphs"),
        (_set("number", 1), "attribute `number` was 0", "register_buffer"),
        (_set("table", {"a": 2}), "attribute `table['a']` was 1", "register_buffer"),
        (_call(X, X), "`mask` is another object", "same kind"),
        (_call(X, k=2), "argument `k` was 1", "Pass a tensor"),
        (_set("layer", nn.Sequential(nn.Linear(4, 4))), "added, removed or replaced", "all blocks alike"),
        (_append, "added, removed or replaced", "all blocks alike"),
        (lambda module: module.requires_grad_(False)(X), "frozen", "Two graphs"),
    ],
)
def test_what_torch_says_is_said_in_plain_words(change: Change, words: str, mend: str) -> None:
    module = Sensitive()
    compiler = compiled(module, scope="module")
    module(X)
    change(module)
    (found,) = compiler.report.recompiles
    assert words in found.advice.words
    assert mend in found.advice.mend


def test_a_batch_of_one_is_named_also_where_other_sizes_came_before() -> None:
    module = Sensitive()
    compiler = compiled(module, scope="module")
    for size in (2, 3, 1):
        module(torch.ones(size, 4))
    advice = compiler.report.recompiles[-1].advice
    assert "is now 1" in advice.words
    assert "batches of one" in advice.mend


def test_sizes_that_were_equal_by_chance_are_named() -> None:
    module = Sensitive()
    compiler = compiled(module, scope="module", kwargs={"dynamic": True})
    for size in (3, 2):
        module(torch.ones(3, size, 4))
    (found,) = compiler.report.recompiles
    assert "sizes of `x` at dimension 1 and of `x` at dimension 0 were equal" in found.advice.words
    assert "for sizes that differ" in found.advice.mend


@pytest.mark.parametrize(
    ("guard", "words", "mend"),
    [
        ("GLOBAL_STATE changed: default_dtype", "default_dtype", "before training"),
        ("GLOBAL_STATE changed: grad_mode", "Gradients were switched", "Two graphs"),
        (
            "kwargs['cache'].layers[2].is_initialized == False # if not x: # a/b.py:133 in update",
            "cache",
            "use_cache=F",
        ),
        ("self._modules['attn'].layer_idx == 2 # keys # a/b.py:1 in update", "own number", "use_cache=False"),
        ("len(kwargs) == 1", "`kwargs` had 1 entries", "same arguments"),
        ("self._modules['a'].rate == 0.5", "`rate` of `self.a` was 0.5", "in all blocks"),
        ("x.size()[0] % 2 == 0", "`x.size()[0] % 2 == 0`", "pad"),
        ("tensor 'x' dispatch key set mismatch. expected DispatchKeySet(CPU), actual", "another kind", "no_grad"),
    ],
)
def test_guards_as_written(guard: str, words: str, mend: str) -> None:
    advice = explain(guard)
    assert words in advice.words
    assert mend in advice.mend


def test_an_unknown_guard_has_no_advice_and_braces_in_one_do_no_harm() -> None:
    assert explain("utterly {new} thing") == ("", "", False)
    assert "`x{0}`" in explain("tensor 'x{0}' stride mismatch at index 0").words


def test_a_guard_is_taken_apart() -> None:
    text = "self.n == 0 # y = x # twice # dir/file.py:3 in forward (user code shown is first use)"
    assert Guard.of(text) == ("self.n == 0", "y = x # twice", "dir/file.py:3 in forward")
    assert Guard.of("GLOBAL_STATE changed: x") == ("GLOBAL_STATE changed: x", "", "")
