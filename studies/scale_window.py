"""At which static loss scales does the deep sigmoid net train? (chapter 11)

A row is a learning rate and a scale. A seed has learnt when its loss ends below 2.
"""
from dataclasses import replace
from functools import partial

import torch

from mpcourse.scaler1 import StaticScaler
from mpcourse.step1 import MixedStep
from mpcourse.toys import get_toy, plain_step, train_toy

RATES = (2e-3, 4e-3, 8e-3)
EXPONENTS = (0, 2, 4, 8, 12, 16, 18, 20, 22, 24)
ROWS = {f'lr {lr:g}, {"FP32" if k is None else f"2^{k}"}': (lr, k)
        for lr in RATES for k in (None, *EXPONENTS)}
SEEDS = range(5)


def run(row, seed):
    "Final loss, whether it learnt, share of skipped steps"
    lr, k = ROWS[row]
    toy = replace(get_toy('deep_sigmoid'), opt=partial(torch.optim.Adam, lr=lr))
    step = plain_step if k is None else MixedStep(StaticScaler(2.**k))
    found = train_toy(toy, step, seed)
    skipped = found.history.get('skipped', [0.])
    return dict(loss=found.loss, learnt=found.loss < 2, skipped=sum(skipped)/len(skipped))


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
