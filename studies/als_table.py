"""Which static scales train a net of seven sigmoid layers, and who needs no tuning? (chapter 19)

Graphcore's figure of BERT-Large in small: 800 steps of 256 digits, a learning rate that climbs to
1e-2 and falls again, the loss divided by 16. A seed has learnt when its loss ends below 2.
"""
from functools import partial

import torch

from mpcourse.als import ALSScaler
from mpcourse.policies import get_policy
from mpcourse.scaler import StaticScaler
from mpcourse.step import MixedStep
from mpcourse.tensorcore import fp32_accumulate
from mpcourse.toys import batches, cross_entropy, deep_sigmoid, digits, fit, plain_step

# a static scale's exponent, or a policy, or None for FP32; and what becomes of an overflow
ROWS = {'FP32': (None, ''), **{f'2^{k}': (k, 'inf') for k in (0, 4, 7, 15, 20, 22, 24, 26)},
        **{f'2^{k}, saturating': (k, 'saturate') for k in (20, 22, 24, 28, 30)},
        **{f'2^{k}, unchecked': (k, 'unchecked') for k in (15, 20, 22, 24)},
        'torch': (partial(get_policy, 'torch'), 'inf'),
        'torch, interval 100': (partial(get_policy, 'torch', growth_interval=100), 'inf'),
        'Megatron': (partial(get_policy, 'megatron'), 'inf'), 'ALS': (ALSScaler, 'inf'),
        'ALS from 2^-20': (partial(ALSScaler, 2.**-20, min_scale=2.**-24), 'inf'),
        'ALS from 2^30': (partial(ALSScaler, 2.**30), 'inf'),
        'ALS, deadband': (partial(ALSScaler, deadband=True), 'inf')}
SEEDS = range(10)


def ramp(steps, warmup=.25):
    "Factor of the learning rate at each step: up to the peak and down again, in straight lines"
    return lambda i: min((i + 1)/(warmup*steps), (steps - i)/((1 - warmup)*steps))


def seven_sigmoids(step, seed=0, divide=16., steps=800):
    "The history of a training whose loss is divided; Adam's eps follows the size of the gradients"
    model, data = deep_sigmoid(seed, depth=7), batches(digits(), 256, steps, seed)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-8*16/divide)
    h = fit(model, data, opt, lambda p, y: cross_entropy(p, y)/divide, step, ramp(steps))
    return h | dict(loss=[divide*l for l in h['loss']])


def unchecked(k):
    "A step at scale 2^k that takes whatever comes"
    mixed = MixedStep(StaticScaler(2.**k))
    def go(model, xb, yb, opt, loss_func):
        if mixed.controller is None: mixed.begin(model)
        opt.zero_grad()
        loss = mixed.backward(model, xb, yb, loss_func)
        torch._foreach_mul_([p.grad for p in model.parameters()], 2.**-k)
        opt.step()
        return loss
    return go


def make_step(kind, how):
    "The step of a row"
    if kind is None: return plain_step
    if how == 'unchecked': return unchecked(kind)
    scaler = StaticScaler(2.**kind) if isinstance(kind, int) else kind()
    return MixedStep(scaler, compute=partial(fp32_accumulate, how))


def ending(h, learnt):
    """What is kept of a history; learnt: a final loss below this; dip: how many octaves the scale falls
    around the peak of the learning rate; low_at: where the lowest mean of ten steps begins, once the
    scale has found its level"""
    loss = sum(h['loss'][-20:])/20
    logs = torch.tensor(h.get('scale', [1.]*len(h['loss']))).log2()
    n = len(logs)
    dip = logs[n//20:n*3//16].mean() - logs[n*3//16:n//2].unfold(0, 10, 1).mean(1).min()
    low_at = n//10 + logs[n//10:].unfold(0, 10, 1).mean(1).argmin()
    skipped = sum(h.get('skipped', [0.]))
    return dict(loss=loss, learnt=loss < learnt, skipped=skipped, end=logs[-1].item(),
                dip=dip.item(),
                low_at=low_at.item())


def run(row, seed):
    "Loss, whether it learnt, skipped steps, last log2 scale, its dip in octaves, where it was lowest"
    return ending(seven_sigmoids(make_step(*ROWS[row]), seed), 2)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
