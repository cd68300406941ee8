"""The two halves of a backward are the whole one: the same bits, every hook once."""

import copy
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from sheer.pipeline.backward import Root, backward, backward_inputs
from tests.harness.host_sync import no_host_sync


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0)


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return Double.apply(x, self.weight)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 4))

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False)


class Branches(nn.Module):
    """One weight on two branches, neither on the way of the other."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, x):
        return self.shared(x[:, :2].repeat(1, 2)) + self.shared(x.flip(1)) * self.scale.exp()


class Twice(nn.Module):
    """One weight twice on one way, and one that is used alone."""

    def __init__(self):
        super().__init__()
        self.shared, self.alone = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.shared(self.alone(self.shared(x).relu()))


class Beside(nn.Module):
    """Weights that meet the way late: positions, a mask's scale, a parametrised matrix; in place too."""

    def __init__(self):
        super().__init__()
        self.position, self.unused = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

    def forward(self, x):
        hidden = x + self.position.cumsum(0).tanh()
        return self.linear(hidden).relu_() + torch.where(hidden > 0, self.position, hidden)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(4), nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, x):
        q, k, v = (part.view(-1, 1, 4) for part in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).view(-1, 4))


class Frozen(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.requires_grad_(False)


KINDS = [lambda: nn.Linear(4, 4), nn.GELU, lambda: nn.LayerNorm(4), Block, Custom, Checkpointed, Branches, Twice]
KINDS += [Beside, Frozen, lambda: nn.Dropout(0.3)]


def run(module, inputs, *, halves, extra=()):
    """Gradients of inputs and parameters; how often each parameter's hooks ran; what was said."""
    counts: Counter[str] = Counter()
    said: list[str] = []
    for name, param in module.named_parameters():
        if param.requires_grad:
            param.register_hook(lambda g, name=name: counts.update([f"{name} hook"]))
            param.register_post_accumulate_grad_hook(lambda p, name=name: counts.update([name]))
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    torch.manual_seed(3)
    outputs = [module(x) for x in leaves] + [make(module) for make in extra]
    roots = [Root(get_gradient_edge(o), torch.ones_like(o) * (i + 1)) for i, o in enumerate(outputs) if o.requires_grad]
    del outputs
    if halves:
        later = backward_inputs(roots, [leaf for leaf in leaves if leaf.requires_grad], tell=said.append)
        early = {name for name in counts if " " not in name}
        del roots
        later()
    else:
        early = set()
        backward(roots)
    grads = {name: param.grad for name, param in module.named_parameters()}
    return grads | {f"input {i}": leaf.grad for i, leaf in enumerate(leaves)}, counts, said, early


def check_equal(module, inputs, extra=()):
    whole = run(copy.deepcopy(module), inputs, halves=False, extra=extra)
    split = run(module, inputs, halves=True, extra=extra)
    assert whole[0].keys() == split[0].keys()
    for name, grad in whole[0].items():
        assert (grad is None) == (split[0][name] is None), name
        assert grad is None or torch.equal(grad, split[0][name]), name
    assert whole[1] == split[1]
    assert set(split[1].values()) <= {1}
    return split


@settings(max_examples=50)
@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=5), st.booleans(), st.integers(0, 99))
def test_halves_equal_the_whole(kinds, input_trains, seed):
    torch.manual_seed(seed)
    module = nn.Sequential(*(kind() for kind in kinds))
    check_equal(module, [torch.randn(3, 4, requires_grad=input_trains)])


@settings(max_examples=50)
@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3), st.integers(0, 99))
def test_several_inputs_of_which_some_train(kinds, seed):
    torch.manual_seed(seed)
    module = nn.Sequential(*(kind() for kind in kinds))
    check_equal(
        module, [torch.randn(3, 4, requires_grad=True), torch.randn(3, 4), torch.randn(3, 4, requires_grad=True)]
    )


def test_only_what_cannot_wait_comes_early():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), Block(), Twice(), Branches(), Beside())
    _, _, said, early = check_equal(module, [torch.randn(3, 4, requires_grad=True)])
    assert early == {"2.shared.weight", "2.shared.bias", "4.position"}
    assert all("used twice on the way" in text for text in said)
    assert len(said) == 2


@pytest.mark.parametrize(("kind", "says"), [(Custom, "DoubleBackward computes all"), (Checkpointed, "checkpointing")])
def test_what_cannot_wait_is_said(kind, says):
    module = nn.Sequential(nn.Linear(4, 4), kind())
    _, _, said, early = check_equal(module, [torch.randn(3, 4, requires_grad=True)])
    assert says in said[0]
    assert early == {name for name, _ in module.named_parameters() if name.startswith("1.")}


def test_a_compiled_block_is_one_node():
    module = nn.Sequential(nn.Linear(4, 4), Block())
    module[1].compile(backend="aot_eager")
    _, _, said, early = check_equal(module, [torch.randn(3, 4, requires_grad=True)])
    assert "computes all its gradients at once" in said[0]
    assert early == {f"1.{name}" for name, _ in module[1].named_parameters()}


def test_an_output_that_no_input_leads_to():
    module = Beside()
    made = [lambda m: m.position * 2, lambda m: m.unused.exp(), lambda m: m.linear.weight.sum()]
    _, _, _, early = check_equal(module, [torch.randn(3, 4, requires_grad=True)], extra=made)
    assert early <= {"position"}


def test_an_input_is_passed_through():
    check_equal(nn.Sequential(), [torch.randn(3, requires_grad=True)])


def test_a_recomputed_region_is_recomputed_once():
    runs = []
    module = nn.Sequential(nn.Linear(4, 4), Checkpointed())
    module[1].body[1].register_forward_hook(lambda *_: runs.append(1))
    check_equal(copy.deepcopy(module), [torch.randn(3, 4, requires_grad=True)])
    runs.clear()
    run(module, [torch.randn(3, 4, requires_grad=True)], halves=True)
    assert len(runs) == 2  # the forward, and once again


def test_each_kernel_runs_once():
    """The matrix products of the halves are those of the whole."""
    from torch.utils.flop_counter import FlopCounterMode

    def flops(halves):
        torch.manual_seed(0)
        module = nn.Sequential(*(Block() for _ in range(3)))
        with FlopCounterMode(display=False) as counter:
            run(module, [torch.randn(3, 4, requires_grad=True)], halves=halves)
        return counter.get_total_flops()

    assert flops(halves=True) == flops(halves=False)


def test_nothing_is_kept_and_nothing_waits_for_the_device():
    torch.manual_seed(0)
    module = nn.Sequential(Block(), Twice(), Beside())
    alive = WeakTensorKeyDictionary()
    x = torch.randn(3, 4, requires_grad=True)
    hidden = module[0](x)
    alive[hidden] = True
    output = module[2](module[1](hidden))
    roots = [Root(get_gradient_edge(output), torch.ones_like(output))]
    del hidden, output
    with no_host_sync():
        later = backward_inputs(roots, [x], tell=lambda text: None)
        del roots
        assert len(alive) <= 1
        later()
    assert not alive
