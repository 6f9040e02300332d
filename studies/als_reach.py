"""Who finds a scale when the loss is a thousand, a million, a billion times smaller? (chapter 19)

The net that reads a digit and draws it (studies/two_heads.py), whose loss is divided by 2^0, 2^10,
2^20 or 2^30, as a change of units divides it. Adam's eps is divided by as much, so that FP32
trains as before. A run has learnt when it reads nine digits of ten and its drawing error is below
0.05; a blank page has 0.2.
"""
from functools import partial

import torch

from mpcourse.als import ALSScaler
from mpcourse.dynamic import DynamicScaler
from mpcourse.policies import get_policy
from mpcourse.scaler import StaticScaler
from mpcourse.step import MixedStep
from mpcourse.tensorcore import fp32_accumulate
from mpcourse.toys import batches, drawings, fit, heads_loss, heads_score, plain_step, two_heads

POLICIES = {'FP32': None, 'torch': partial(get_policy, 'torch'),
            'torch, interval 10': partial(get_policy, 'torch', growth_interval=10),
            'torch, interval 5': partial(get_policy, 'torch', growth_interval=5),
            'Megatron': partial(get_policy, 'megatron'),
            'LogMax': partial(get_policy, 'logmax'), 'from 2^64': partial(DynamicScaler, 2.**64),
            'measured': None, 'ALS': ALSScaler}
DIVISORS = (0, 10, 20, 30)
ROWS = {f'{name}, / 2^{k}': (name, k) for k in DIVISORS for name in POLICIES}
SEEDS = range(10)


def make_step(name, model, batch, loss_func):
    "The step of a row; a measured scale sees the first batch"
    if name == 'FP32': return plain_step
    if name == 'measured': return MixedStep(StaticScaler.measured(model, batch, loss_func))
    return MixedStep(POLICIES[name]())


def train(name, k, seed=0, steps=150):
    "The trained net, and the history of a training whose loss is divided by 2^k"
    data, model = drawings(), two_heads(seed)
    def loss_func(pred, y): return heads_loss(pred, y)/2.**k
    step = make_step(name, model, next(batches(data, 256, 1, seed)), loss_func)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-8/2.**k)
    with fp32_accumulate():
        return model, fit(model, batches(data, 256, steps, seed), opt, loss_func, step)


def run(row, seed):
    "Whether it learnt, accuracy and drawing error on new digits, skipped steps, log2 of the last scale"
    model, history = train(*ROWS[row], seed)
    accuracy, error = heads_score(model, drawings())
    end = torch.tensor(history.get('scale', [1.])[-1]).log2()
    return dict(learnt=accuracy > .9 and error < .05, accuracy=accuracy, error=error,
                skipped=sum(history.get('skipped', [0.])), end=end)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
