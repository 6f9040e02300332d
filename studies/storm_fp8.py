"""Does FP8 survive the storms that FP32 does not notice, and what keeps a bad batch out without FP16? (chapter 29)

The net, the storms and the judgement are those of `studies/storm_heads.py`; products are taken in FP8, everything else
in FP32, and a step whose gradients are not finite is skipped. `and a guard`: a batch whose loss is more than ten times
the median of the last twenty is left out, in five lines.
"""
from statistics import median

import torch

from mpcourse.fp8 import simulate_fp8
from mpcourse.step import MixedStep
from mpcourse.scaler import StaticScaler
from mpcourse.toys import batches, drawings, fit, heads_loss, heads_score, two_heads
from storm_heads import STORMS
from storm_study import fp32_step, in_storm

RECIPES = {'E4M3 per tensor': 'tensorwise', 'E4M3 blocks': 'mx', 'E4M3 delayed': 'delayed'}
GUARDED = 'FP32', 'BF16', 'E4M3 per tensor'
ROWS = [f'{scheme}: {storm}' for scheme in RECIPES for storm in STORMS]
ROWS += [f'{scheme} and a guard: {storm}' for scheme in GUARDED for storm in ('none', 'bright')]
SEEDS = range(10)


def guarded(step):
    "The same step, without batches whose loss stands out"
    last = []
    def go(model, xb, yb, opt, loss_func):
        with torch.no_grad(): loss = loss_func(model(xb), yb)
        if len(last) == 20 and not loss < 10*median(last): return dict(loss=loss, scale=1., skipped=1.)
        last[:] = [*last, loss.item()][-20:]
        return step(model, xb, yb, opt, loss_func)
    return go


def run(row, seed):
    "Mean of the last 20 losses, accuracy and drawing error on new digits, skipped steps"
    scheme, storm = row.split(': ')
    scheme, guard, _ = scheme.partition(' and a guard')
    data, model = drawings(), two_heads(seed)
    if scheme in RECIPES: model = simulate_fp8(model, RECIPES[scheme])
    step = MixedStep(StaticScaler(1.), torch.bfloat16, clip=1.) if scheme == 'BF16' else fp32_step(1.)
    if guard: step = guarded(step)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    seen = fit(model, batches(data, 256, 200, seed), opt, heads_loss, in_storm(step, storm, seed, STORMS))
    accuracy, error = heads_score(model, data)
    return dict(loss=sum(seen['loss'][-20:])/20, accuracy=accuracy, error=error, skipped=sum(seen['skipped']))


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
