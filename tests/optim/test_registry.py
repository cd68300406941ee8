"""Optimizers by name: which class and kernel a name means, and what each mistake is answered with."""

from __future__ import annotations

import pytest
import torch

from sheer.errors import ConfigError
from sheer.optim.lion import Lion
from sheer.optim.registry import optimizer_factory


class OwnOptimizer(torch.optim.SGD):
    """A user's class, found by import path; refuses to be built, so that trying it out would show."""

    def __init__(self, params, lr=0.1, *, strength=1.0):
        raise AssertionError("a user's class must not be built by the factory")


OWN = f"{__name__}.OwnOptimizer"


@pytest.mark.parametrize(
    ("name", "params", "cls", "kwargs"),
    [
        ("Adam", {"lr": 0.1}, torch.optim.Adam, {"lr": 0.1, "fused": True}),
        ("adam", {"betas": [0.9, 0.95]}, torch.optim.Adam, {"betas": (0.9, 0.95), "fused": True}),
        ("AdamW", {"lr": "auto"}, torch.optim.AdamW, {"fused": True}),
        ("Adam", {"adam_w_mode": True}, torch.optim.AdamW, {"weight_decay": 0.0, "fused": True}),
        ("Adam", {"adam_w_mode": False, "torch_adam": True}, torch.optim.Adam, {"fused": True}),
        ("AdamW", {"adam_w_mode": True, "bias_correction": True}, torch.optim.AdamW, {"fused": True}),
        ("sgd", {"lr": 1, "momentum": 0.9}, torch.optim.SGD, {"lr": 1, "momentum": 0.9, "foreach": True}),
        ("Adagrad", {}, torch.optim.Adagrad, {"foreach": True}),
        ("rmsprop", {"foreach": False}, torch.optim.RMSprop, {"foreach": False}),
        ("AdamW", {"fused": False}, torch.optim.AdamW, {"fused": False}),
        ("torch.optim.NAdam", {}, torch.optim.NAdam, {"foreach": True}),
        ("lion", {"lr": 1e-4, "betas": [0.9, 0.98]}, Lion, {"lr": 1e-4, "betas": (0.9, 0.98)}),
    ],
)
def test_a_name_means_a_class_and_its_best_kernel(name, params, cls, kwargs):
    before = dict(params)
    recipe = optimizer_factory(name, params)
    assert recipe.cls is cls
    assert recipe.kwargs == kwargs
    assert params == before


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "Lion"])
def test_a_recipe_builds_an_optimizer_that_steps(name):
    recipe = optimizer_factory(name, {"lr": 0.1})
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = recipe.cls([weight], **recipe.kwargs)
    weight.grad = torch.ones(3)
    optimizer.step()
    assert torch.all(weight < 1)


def test_a_users_class_by_path_is_checked_but_not_built():
    recipe = optimizer_factory(OWN, {"strength": 2.0})
    assert recipe.cls.__name__ == "OwnOptimizer"
    assert recipe.kwargs == {"strength": 2.0}
    with pytest.raises(ConfigError, match=r"optimizer.params.strenght=2.0.*Did you mean 'strength'"):
        optimizer_factory(OWN, {"strenght": 2.0})


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("AdamX", {}, r"optimizer.type='AdamX' is not known.*Did you mean 'Adam"),
        ("lamb", {}, r"optimizer.type='lamb' is DeepSpeed's, and not available here: its trust ratio"),
        ("OneBitAdam", {}, r"compressed communication is not built"),
        ("FusedAdam", {}, r"a class of DeepSpeed's: its type is 'AdamW'"),
        ("DeepSpeedCPUAdam", {}, r"its type is 'AdamW'.*offload_optimizer"),
        ("LBFGS", {}, r"cannot be used: it evaluates the loss again"),
        ("torch.optim.LBFGS", {}, r"cannot be used: it evaluates the loss again"),
        ("SparseAdam", {}, r"sparse gradients only"),
        ("Adafactor", {}, r"flat pieces"),
        ("torch.nn.Linear", {}, r"is not a subclass of torch.optim.Optimizer"),
        ("torch.optim.adam.Adm", {}, r"has no class 'Adm'. Did you mean 'Adam'"),
        (
            "AdamW",
            {"learning_rate": 1},
            r"optimizer.params.learning_rate=1: AdamW has no parameter.*Allowed are amsgrad",
        ),
        ("AdamW", {"beta": [0.9, 0.9]}, r"optimizer.params.beta=.*Did you mean 'betas'"),
        ("AdamW", {"lr": "1e-3"}, r"optimizer.params.lr='1e-3': a number is needed"),
        ("AdamW", {"betas": 0.9}, r"optimizer.params.betas=0.9: a list of 2 numbers"),
        ("AdamW", {"amsgrad": "yes"}, r"optimizer.params.amsgrad='yes': true or false"),
        ("AdamW", {"lr": -1.0}, r"AdamW cannot be built with .*Invalid learning rate: -1.0"),
        ("Lion", {"betas": [1.0, 0.9]}, r"Lion cannot be built with .*must lie in \[0, 1\)"),
        ("AdamW", {"max_grad_norm": 1.0}, r"max_grad_norm=1.0: clipping belongs to the engine.*gradient_clipping"),
        ("AdamW", {"adam_w_mode": False}, r"contradicts optimizer.type='AdamW'"),
        ("Adam", {"adam_w_mode": "true"}, r"adam_w_mode='true': true or false"),
        ("Adam", {"bias_correction": False}, r"bias_correction=False: only True is possible"),
        ("SGD", {"adam_w_mode": True}, r"SGD has no parameter 'adam_w_mode'"),
        ("SGD", {"params": []}, r"SGD has no parameter 'params'"),
    ],
)
def test_mistakes_name_the_key_and_what_is_allowed(name, params, message):
    with pytest.raises(ConfigError, match=message):
        optimizer_factory(name, params)
