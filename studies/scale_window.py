"""At which static loss scales does the deep sigmoid net train? (chapter 08)

A row is a learning rate and a scale, or a scale measured once, on the first batch. A seed has learnt
when its loss ends below 2.
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
SEEDS = range(5)


def make_step(scale, toy, seed):
    "The step of a row"
    if scale is None: return plain_step
    if scale != 'measured': return MixedStep(StaticScaler(scale))
    batch = next(batches(toy.data(), toy.bs, 1, seed))
    return MixedStep(StaticScaler.measured(toy.model(seed=seed), batch, toy.loss_func))


def run(row, seed):
    "Final loss, whether it learnt, share of skipped steps"
    lr, scale = ROWS[row]
    toy = replace(get_toy('deep_sigmoid'), opt=partial(torch.optim.Adam, lr=lr))
    found = train_toy(toy, make_step(scale, toy, seed), seed)
    skipped = found.history.get('skipped', [0.])
    return dict(loss=found.loss, learnt=found.loss < 2, skipped=sum(skipped)/len(skipped))


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
