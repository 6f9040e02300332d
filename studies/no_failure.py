"""What does not fail? Six trainings in FP16 without a loss scale, beside FP32 (chapter 03)

In the rows in FP16 both passes run in half precision, weights and optimizer in FP32. The score
says how good the net is in the end, the higher the better.
"""
import math
from types import SimpleNamespace

import torch, torch.nn.functional as F
from torch import nn

from mpcourse.tensorcore import fp32_accumulate
from mpcourse.toys import digits, mlp

DATA = digits()
X, Y, NEW_X, NEW_Y = *DATA.train, *DATA.valid


def accuracy(model): return (model(NEW_X).argmax(1) == NEW_Y).float().mean().item()


def classify(seed):
    "Digits, cross-entropy"
    return SimpleNamespace(model=mlp([64, 128, 128, 10], seed=seed), x=X, y=Y,
                           loss=lambda f, x, y: F.cross_entropy(f(x), y), score=accuracy)


def distil(seed, temperature=20.):
    "A teacher's answers at a high temperature, without the factor T^2 that makes up for it"
    teacher = mlp([64, 128, 128, 10], seed=1000)
    train(SimpleNamespace(**{**vars(classify(1000)), 'model': teacher}), 0, half=False)
    with torch.no_grad(): answers = F.softmax(teacher(X)/temperature, 1)

    def loss(f, x, y): return F.kl_div(F.log_softmax(f(x)/temperature, 1), y, reduction='batchmean')
    return SimpleNamespace(model=mlp([64, 128, 128, 10], seed=seed), x=X, y=answers, loss=loss,
                           score=accuracy)


def contrast(seed, temperature=.07):
    "Two noisy views of a picture find each other (InfoNCE); judged by the nearest neighbour's label"
    gen = torch.Generator().manual_seed(seed)

    def loss(f, x, y):
        views = [F.normalize(f(x + .15*torch.randn(x.shape, generator=gen).to(x)), dim=1)
                 for _ in range(2)]
        return F.cross_entropy(views[0] @ views[1].T/temperature, torch.arange(len(x)))

    def score(model):
        known, new = F.normalize(model(X), dim=1), F.normalize(model(NEW_X), dim=1)
        return (Y[(new @ known.T).argmax(1)] == NEW_Y).float().mean().item()
    return SimpleNamespace(model=mlp([64, 128, 128, 32], seed=seed), x=X, y=Y, loss=loss,
                           score=score)


def regress(seed, unit=.1):
    "A function of 16 numbers, in a unit that makes its values a tenth; judged by 1 - relative error"
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 16, generator=gen)
    y = unit*(torch.sin(x @ torch.randn(16, generator=gen)) + .3*x[:, 0]*x[:, 1])[:, None]
    def score(model): return 1 - ((model(x) - y).norm()/y.norm()).item()
    return SimpleNamespace(model=mlp([16, 128, 128, 1], seed=seed), x=x, y=y,
                           loss=lambda f, x, y: F.mse_loss(f(x), y), score=score)


def solve(seed):
    "A physics-informed net: u'' = -pi^2 sin(pi x), zero at both ends; judged by 1 - the largest error"
    def loss(f, x, y):
        x = x.requires_grad_()
        slope, = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        bend, = torch.autograd.grad(slope.sum(), x, create_graph=True)
        ends = f(torch.tensor([[0.], [1.]]).to(x))
        return (bend.float() + math.pi**2*torch.sin(math.pi*x.float())).square().mean() + 10*ends.square().mean()

    def score(model):
        line = torch.linspace(0, 1, 101)[:, None]
        return 1 - (model(line) - torch.sin(math.pi*line)).abs().max().item()
    x = torch.rand(4096, 1, generator=torch.Generator().manual_seed(0))
    return SimpleNamespace(model=mlp([1, 32, 32, 1], nn.Tanh, seed), x=x, y=x, loss=loss,
                           score=score)


def field(seed, side=128):
    "A neural field: one picture of 128 x 128 as a function of its coordinates, all pixels a step; the score is in tens of dB"
    axis = torch.linspace(-1, 1, side)
    x = torch.cartesian_prod(axis, axis)
    waves = torch.cat([f(math.pi*2**k*x) for k in range(5) for f in (torch.sin, torch.cos)], 1)
    y = F.interpolate(X[:1], (side, side), mode='bilinear').flatten()[:, None]
    def score(model): return -math.log10(F.mse_loss(model(waves), y).item())
    return SimpleNamespace(model=mlp([20, 64, 64, 1], seed=seed), x=waves, y=y,
                           loss=lambda f, x, y: F.mse_loss(f(x), y), score=score, bs=side**2,
                           steps=100)


KINDS = {'classification': classify, 'distillation, T = 20': distil,
         'contrastive, temperature .07': contrast,
         'regression, small targets': regress, 'physics-informed': solve, 'neural field, 16,384 pixels a step': field}
ROWS = [f'{kind}, {dtype}' for kind in KINDS for dtype in ('FP32', 'FP16')]
SEEDS = range(10)


def train(task, seed, half):
    "Adam at 3e-3, 300 steps of 256 unless the task says otherwise"
    gen, bs = torch.Generator().manual_seed(seed), getattr(task, 'bs', 256)
    opt = torch.optim.Adam(task.model.parameters(), lr=3e-3)
    for _ in range(getattr(task, 'steps', 300)):
        rows = torch.randint(len(task.x), (bs,), generator=gen) if bs < len(task.x) else slice(None)
        def model(x):
            with torch.autocast('cpu', torch.float16, enabled=half): return task.model(x).float()
        with fp32_accumulate():
            loss = task.loss(model, task.x[rows], task.y[rows])
            opt.zero_grad()
            loss.backward()
        opt.step()


def run(row, seed):
    "How good the net is"
    kind, _, dtype = row.rpartition(', ')
    task = KINDS[kind](seed)
    train(task, seed, dtype == 'FP16')
    with torch.no_grad(): return dict(score=task.score(task.model))


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
