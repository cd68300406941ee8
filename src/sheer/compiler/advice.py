"""A failed guard in plain words, and what to change so that it holds.

Dynamo says a guard as the Python expression that no longer holds, with the line of code it comes from:
`self.calls == 3 # y = y * self.calls # package/model.py:12 in forward`. The patterns below were read off torch 2.13.
A guard that none of them knows is shown as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class Advice(NamedTuple):
    """What happened, in a sentence, and what to do about it; either may be empty."""

    words: str
    mend: str
    certain: bool = False
    """Whether this guard is always too much: it makes a graph for every layer, so it is worth a word at once."""


class Guard(NamedTuple):
    """The three parts of dynamo's sentence."""

    condition: str
    """What was assumed and no longer held."""
    code: str
    """The line that made dynamo assume it; empty where dynamo does not say."""
    place: str
    """`file:line in function`, the file without its first folders."""

    @classmethod
    def of(cls, text: str) -> Guard:
        """Take `condition # code # place` apart; the code may contain `#` itself."""
        condition, _, rest = text.partition(" # ")
        code, _, place = rest.rpartition(" # ")
        return cls(condition.strip(), code.strip(), place.partition(" (")[0].strip())


_SIZES = "One more graph, for all sizes, is normal and the last. Where it goes on: pad to few sizes, or set"
_ONES = (
    "The size of `{0}` at dimension {1} is now 1 (or 0), which torch always compiles on its own",
    "One more graph is normal. Drop or pad batches of one to be rid of it.",
)
_NO_CACHE = "Set use_cache=False in the model's config (or in the call) for training; generate() may turn it on again."

# Tried in this order on the condition: a pattern, its sentence ({0}, {1}... are the pattern's groups), the mend.
_KNOWN: Sequence[tuple[str, str, str]] = (
    # A key-value cache of transformers is an argument with Python state, one layer's after the other's.
    (
        r"(is_initialized|past_key_value|key_cache|cumulative_length)",
        "A key-value cache is kept while training",
        _NO_CACHE,
    ),
    (r"\.layer_idx (?:==|!=) \d+", "Each layer reads its own number, to find its part of a key-value cache", _NO_CACHE),
    (r"tensor '(.+)' size mismatch at index (\d+)\. expected \d+, actual [01]$", *_ONES),
    (
        r"tensor '(.+)' size mismatch at index (\d+)\. expected (\d+), actual (\d+)",
        "The size of `{0}` at dimension {1} was {2} and is now {3}",
        f'{_SIZES} "kwargs": {{"dynamic": true}}.',
    ),
    (r"\b2 <= (.+?)\.size\(\)\[(\d+)\]", *_ONES),
    (
        r"^(.+?)\.size\(\)\[(\d+)\] == (.+?)\.size\(\)\[(\d+)\]$",
        "The sizes of `{0}` at dimension {1} and of `{2}` at dimension {3} were equal when it was compiled, which torch"
        " takes for one size, and now differ",
        "One more graph, for sizes that differ, is normal.",
    ),
    (
        r"\.size\(\)\[\d+\]",
        "A condition on sizes no longer holds: `{condition}`",
        'Where every size has such a condition, pad to few sizes, or set "kwargs": {"dynamic": false}.',
    ),
    (
        r"tensor '(.+)' stride mismatch",
        "`{0}` lies in memory in another order (a transposed or sliced view)",
        "Call .contiguous() on it before the module.",
    ),
    (
        r"tensor '(.*_parameters\[.+)' requires_grad mismatch",
        "The parameter `{0}` was frozen or unfrozen",
        "Two graphs, one for each, are normal.",
    ),
    (
        r"tensor '(.+)' requires_grad mismatch",
        "`{0}` needs a gradient in some calls and in others not (the first block often gets one that does not)",
        "Two graphs, one for each, are normal.",
    ),
    (
        r"tensor '(.+)' dtype mismatch\. expected (\w+), actual (\w+)",
        "`{0}` was {1} and is now {2}",
        "Cast it before the module, or use the engine's precision for all of the model.",
    ),
    (
        r"tensor '(.+)' rank mismatch\. expected (\d+), actual (\d+)",
        "`{0}` had {1} dimensions and now has {2}",
        "Give it in one form.",
    ),
    (
        r"tensor '(.+)' dispatch key set mismatch",
        "`{0}` is another kind of tensor (an inference tensor, or on another device)",
        "Use torch.no_grad() in place of torch.inference_mode(), or one of them throughout.",
    ),
    (
        r"GLOBAL_STATE changed: (?:grad_mode)|torch\.is_grad_enabled",
        "Gradients were switched on or off",
        "Two graphs, one for each, are normal.",
    ),
    (
        r"GLOBAL_STATE changed: autocast",
        "Autocast was switched on or off",
        "Enter it around every call, or around none.",
    ),
    (
        r"GLOBAL_STATE changed: (\w+)",
        "A global setting of torch changed: `{0}`",
        "Set it once, before training.",
    ),
    (
        r"\.training (?:==|!=) ",
        "The module went from train() to eval() or back",
        "Two graphs, one for each, are normal.",
    ),
    (
        r"len\((\w+)\._modules|_modules.*_modules\) [!=]=|___check_(?:type|obj)_id\((.*_modules\[.+?\])",
        "A module inside was added, removed or replaced",
        "Do so before training, or on all blocks alike; one more graph after it is normal.",
    ),
    (
        r"^len\((.+)\) (?:==|!=) (\d+)$",
        "`{0}` had {1} entries and now has another number of them",
        "Give the same arguments in every call: pass None or an empty value by name rather than leaving it out.",
    ),
    (
        r"^(\w+)\.(?!_modules)([\w.\[\]']+) (?:==|!=) ([-\d.]+|True|False|'.*')$",
        "The attribute `{1}` was {2} and now has another value; a module's Python value is a constant to the compiler",
        "Keep it in a tensor (register_buffer), or change it outside forward and seldom.",
    ),
    (
        r"^(.*_modules\[.+\])\.(\w+) (?:==|!=) ([-\d.]+|True|False|'.*')$",
        "The attribute `{1}` of `{0}` was {2} and is not the same in all blocks or calls",
        "A Python value of a module is a constant to the compiler: keep it in a tensor (register_buffer), or make it"
        " the same in all blocks.",
    ),
    (
        r"^(.+) (?:==|!=) ([-\d.]+|True|False|'.*')$",
        "The argument `{0}` was {1} and is now another value; a Python value is a constant to the compiler",
        "Pass a tensor, or the same value every time.",
    ),
    (
        r"___check_(?:type|obj)_id\((.+?),|expected type of '(.+?)'|^(.+) is (?:not )?None|^(?:not )?(\w+)$",
        "`{0}` is another object or of another type than before",
        "Give the same kind of argument in every call.",
    ),
)


def explain(text: str) -> Advice:
    """What the guard `text` says, in plain words, and the mend; both empty where the guard is unknown."""
    guard = Guard.of(text)
    for pattern, words, mend in _KNOWN:
        found = re.search(pattern, guard.condition)
        if found:
            groups = [_plain(group) for group in found.groups() if group is not None]
            return Advice(words.format(*groups, condition=guard.condition) + ".", mend, mend is _NO_CACHE)
    return Advice("", "")


def _plain(expression: str) -> str:
    """`self._modules['up']._parameters['weight']` as `self.up.weight`."""
    return re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", expression)
