"""Lion against the paper's formula, written out by hand."""

from __future__ import annotations

import pytest
import torch

from sheer.optim.lion import Lion


def by_hand(weight, grads, *, lr, betas, weight_decay):
    weight, average = weight.clone(), torch.zeros_like(weight)
    for grad in grads:
        direction = torch.sign(betas[0] * average + (1 - betas[0]) * grad)
        weight = weight - lr * (direction + weight_decay * weight)
        average = betas[1] * average + (1 - betas[1]) * grad
    return weight, average


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("lr", [0.05, torch.tensor(0.05, dtype=torch.float64)])
@pytest.mark.parametrize("maximize", [False, True])
def test_it_follows_the_paper(weight_decay, lr, maximize):
    torch.manual_seed(0)
    start = [torch.randn(3, 4, dtype=torch.float64), torch.randn(5, dtype=torch.float64)]
    params = [torch.nn.Parameter(tensor.clone()) for tensor in start]
    grads = [[torch.randn_like(tensor) for _ in range(6)] for tensor in start]
    optimizer = Lion(params, lr=lr, betas=(0.8, 0.95), weight_decay=weight_decay, maximize=maximize)
    for step in range(6):
        for param, history in zip(params, grads, strict=True):
            param.grad = history[step].clone()
        optimizer.step()
    for param, tensor, history in zip(params, start, grads, strict=True):
        assert torch.equal(param.grad, history[-1])
        wanted = [-grad for grad in history] if maximize else history
        weight, average = by_hand(tensor, wanted, lr=0.05, betas=(0.8, 0.95), weight_decay=weight_decay)
        torch.testing.assert_close(param.detach(), weight)
        torch.testing.assert_close(optimizer.state[param]["exp_avg"], average)


def test_flat_pieces_are_updated_as_the_whole():
    torch.manual_seed(0)
    start, grads = torch.randn(10), [torch.randn(10) for _ in range(3)]

    def train(pieces):
        params = [torch.nn.Parameter(start[piece].clone()) for piece in pieces]
        optimizer = Lion(params, lr=0.1, weight_decay=0.1)
        for grad in grads:
            for param, piece in zip(params, pieces, strict=True):
                param.grad = grad[piece].clone()
            optimizer.step()
        return torch.cat([param.detach() for param in params])

    assert torch.equal(train([slice(0, 10)]), train([slice(0, 3), slice(3, 10)]))


def test_parameters_without_a_gradient_are_left_alone_and_closures_run():
    used, unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = Lion([used, unused], lr=0.5)

    def closure():
        optimizer.zero_grad()
        loss = (used * 2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert used.tolist() == [0.5, 0.5]
    assert unused.tolist() == [1.0, 1.0]
    assert unused not in optimizer.state


def test_state_survives_saving():
    def build():
        param = torch.nn.Parameter(torch.ones(3))
        param.grad = torch.tensor([1.0, -1.0, 2.0])
        return param, Lion([param], lr=0.1)

    param, optimizer = build()
    optimizer.step()
    other, resumed = build()
    resumed.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        other.copy_(param)
    for one, opt in ((param, optimizer), (other, resumed)):
        one.grad = torch.tensor([-0.5, 0.001, -3.0])
        opt.step()
    assert torch.equal(param, other)
