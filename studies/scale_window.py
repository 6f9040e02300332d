"""At which static loss scales does the deep sigmoid net train? (chapters 08 and 09)

A row is a learning rate and a scale, or a scale measured once, on the first batch. One row skips a
third of the steps in FP32, at random. A seed has learnt when its loss ends below 2.
"""
from dataclasses import replace
from functools import partial

import torch

from mpcourse.scaler import StaticScaler
from mpcourse.step import MixedStep
from mpcourse.toys import batches, get_toy, plain_step, train_toy

RATES = (2e-3, 4e-3, 8e-3)
EXPONENTS = (0, 2, 4, 8, 12, 16, 18, 20, 22, 24)
SCALES = {'FP32': None, **{f'2^{k}': 2.**k for k in EXPONENTS}, 'measured': 'measured'}
ROWS = {f'lr {lr:g}, {name}': (lr, s) for lr in RATES for name, s in SCALES.items()}
THIRD = 'lr 0.004, FP32, a third of the steps skipped'
ROWS[THIRD] = 4e-3, None
SEEDS = range(5)


def make_step(scale, toy, seed):
    "The step of a row"
    if scale is None: return plain_step
    if scale != 'measured': return MixedStep(StaticScaler(scale))
    batch = next(batches(toy.data(), toy.bs, 1, seed))
    return MixedStep(StaticScaler.measured(toy.model(seed=seed), batch, toy.loss_func))


def skip_a_third(seed):
    "FP32's step, but not for every batch"
    draws = torch.Generator().manual_seed(seed)
    def step(model, xb, yb, opt, loss_func):
        if torch.rand((), generator=draws) > 1/3: return plain_step(model, xb, yb, opt, loss_func)
        with torch.no_grad(): return loss_func(model(xb), yb)
    return step


def run(row, seed):
    "Final loss, whether it learnt, share of skipped steps"
    lr, scale = ROWS[row]
    toy = replace(get_toy('deep_sigmoid'), opt=partial(torch.optim.Adam, lr=lr))
    step = skip_a_third(seed) if row == THIRD else make_step(scale, toy, seed)
    found = train_toy(toy, step, seed)
    skipped = found.history.get('skipped', [0.])
    return dict(loss=found.loss, learnt=found.loss < 2, skipped=sum(skipped)/len(skipped))


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
