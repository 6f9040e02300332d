"""Does FP8 survive the storms that FP32 does not notice? (chapter 33)

And what keeps a bad batch out without FP16?

The net, the storms and the judgement are those of `studies/storm_heads.py`; products are taken in
FP8, everything else in FP32, and a step whose gradients are not finite is skipped. `and a guard`:
a batch whose loss is more than ten times the median of the last twenty is left out, in five lines.
`good batches`: how many of them the guard would leave out, in FP32, on the nine nets of
`studies/every_scheme.py`.
"""
from statistics import median

import torch

from mpcourse.fp8 import simulate_fp8
from mpcourse.scaler import StaticScaler
from mpcourse.step import MixedStep
from mpcourse.toys import batches, drawings, fit, heads_loss, heads_score, two_heads
from every_scheme import NETS
from storm_heads import STORMS
from storm_study import fp32_step, in_storm

RECIPES = {'E4M3 per tensor': 'tensorwise', 'E4M3 blocks': 'mx', 'E4M3 delayed': 'delayed'}
GUARDED = 'FP32', 'BF16', 'E4M3 per tensor'
ROWS = [f'{scheme}: {storm}' for scheme in RECIPES for storm in STORMS]
ROWS += [f'{scheme} and a guard: {storm}' for scheme in GUARDED for storm in ('none', 'bright')]
ROWS += [f'{net}: good batches' for net in NETS]
SEEDS = range(10)


def stands_out(loss, last): return len(last) == 20 and not loss < 10*median(last)


def guarded(step):
    "The same step, without batches whose loss stands out"
    last = []
    def go(model, xb, yb, opt, loss_func):
        with torch.no_grad(): loss = loss_func(model(xb), yb)
        if stands_out(loss, last): return dict(loss=loss, scale=1., skipped=1.)
        last[:] = [*last, loss.item()][-20:]
        return step(model, xb, yb, opt, loss_func)
    return go


def left_out(t):
    "Good batches whose loss stands out, and all batches"
    losses = fit(t.model, t.batches(), t.opt(t.model.parameters()), t.loss_func,
        schedule=t.schedule)['loss']
    return dict(left_out=sum(stands_out(loss, losses[max(0, i - 20):i])
                             for i, loss in enumerate(losses)), batches=len(losses))


def run(row, seed):
    "Mean of the last 20 losses, accuracy and drawing error on new digits, skipped steps; or what `left_out` counts"
    scheme, storm = row.split(': ')
    if storm == 'good batches': return left_out(NETS[scheme](seed))
    scheme, guard, _ = scheme.partition(' and a guard')
    data, model = drawings(), two_heads(seed)
    if scheme in RECIPES: model = simulate_fp8(model, RECIPES[scheme])
    step = fp32_step(1.)
    if scheme == 'BF16': step = MixedStep(StaticScaler(1.), torch.bfloat16, clip=1.)
    if guard: step = guarded(step)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    seen = fit(model, batches(data, 256, 200, seed), opt, heads_loss,
               in_storm(step, storm, seed, STORMS))
    accuracy, error = heads_score(model, data)
    return dict(loss=sum(seen['loss'][-20:])/20, accuracy=accuracy, error=error,
                skipped=sum(seen['skipped']))


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
