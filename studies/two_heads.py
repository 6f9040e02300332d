"""Does FP16 keep a second head, whose loss has a small weight, from learning? (README, chapters
03, 04, 08, 10 and 13)

A row is a way to train the net that reads a digit and draws it, with Adam, 150 steps of 256
digits. The drawing's loss has a weight of .01; in the row *weight 1* it has a weight of 1. The row
*dynamic, no headroom* begins with the scale of *measured, no headroom* and follows torch's rule;
*metaseq* follows metaseq's, from its published start of 4 or from 2^16.
"""
from functools import partial

import torch

from mpcourse.dynamic import DynamicScaler
from mpcourse.policies import get_policy
from mpcourse.scaler import StaticScaler
from mpcourse.step import MixedStep
from mpcourse.tensorcore import fp32_accumulate
from mpcourse.toys import batches, drawings, fit, heads_loss, heads_score, plain_step, two_heads

STEPS = {'FP32': lambda: plain_step, 'FP16, scale 1': lambda: MixedStep(StaticScaler(1.)),
         'FP16, scale 2^12': lambda: MixedStep(StaticScaler(2.**12)), 'FP32, only the flush': lambda: plain_step,
         'FP16, scale 1, weight 1': lambda: MixedStep(StaticScaler(1.))}
DYNAMIC = 'FP16, dynamic, no headroom'
TARGETS = {'FP16, measured': 2.**10, 'FP16, measured, no headroom': 2.**15, DYNAMIC: 2.**15}
LATER = {'FP16, scale 2^16': lambda: MixedStep(StaticScaler(2.**16)),
         'FP16, metaseq': lambda: MixedStep(get_policy('metaseq')),
         'FP16, metaseq from 2^16': lambda: MixedStep(get_policy('metaseq', init_scale=2.**16))}
ROWS = [*STEPS, *TARGETS, *LATER]
STEPS |= LATER
SEEDS = range(10)


def flush(g):
    "Zero where FP16 would round to zero, and nothing else"
    return torch.where(g.abs() < 2.**-25, 0., g)


def flush_gradients(model):
    "The control: all is FP32, but what flows back through a layer's output is flushed"
    def watch(module, args, out):
        if out.requires_grad: out.register_hook(flush)
    for m in model.modules():
        if not list(m.children()): m.register_forward_hook(watch)


def run(row, seed):
    "Drawing error, accuracy on new digits, mean of the last 20 losses, skipped steps"
    data, model = drawings(), two_heads(seed)
    loss_func = partial(heads_loss, weight=1. if 'weight 1' in row else .01)
    if row == 'FP32, only the flush': flush_gradients(model)
    if row in TARGETS:
        first = next(batches(data, 256, 1, seed))
        scaler = StaticScaler.measured(model, first, loss_func, TARGETS[row])
        if row == DYNAMIC: scaler = DynamicScaler(scaler.scale.item())
        step = MixedStep(scaler)
    else: step = STEPS[row]()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    with fp32_accumulate():
        history = fit(model, batches(data, 256, 150, seed), opt, loss_func, step)
    accuracy, error = heads_score(model, data)
    return dict(error=error, accuracy=accuracy, loss=sum(history['loss'][-20:])/20,
                skipped=sum(history.get('skipped', [0])))


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
