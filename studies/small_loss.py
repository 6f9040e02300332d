"""Which scale trains two heads if the loss, or a part of it, is very small or very large? (chapter 08)

The net that reads a digit and draws it, with Adam, 150 steps of 256 digits. The whole loss is
multiplied by 2^-16 or by 2^12, or the drawing's weight alone by 2^-16. Adam's epsilon is multiplied
by the same factor, except for the drawing, which has 1e-13. A row names the scale; `measured` looks
at the first batch; a moving scale is chapter 10's, with a first one of 2^16 or 2^32.
"""
from functools import partial

import torch

from mpcourse.dynamic import DynamicScaler
from mpcourse.scaler import StaticScaler
from mpcourse.step import MixedStep
from mpcourse.tensorcore import fp32_accumulate
from mpcourse.toys import batches, drawings, fit, heads_loss, heads_score, plain_step, two_heads

LOSSES = {'loss × 2^-16': (lambda pred, y: heads_loss(pred, y)*2.**-16, 1e-8*2.**-16),
          'loss × 2^12': (lambda pred, y: heads_loss(pred, y)*2.**12, 1e-8*2.**12),
          'drawing × 2^-16': (partial(heads_loss, weight=.01*2.**-16), 1e-13)}
MOVING = 'moving from 2^16', 'moving from 2^32'
SCALES = {'loss × 2^-16': ('measured', '2^12', '2^16', *MOVING), 'loss × 2^12': ('measured', '2^12', '2^16', *MOVING),
          'drawing × 2^-16': ('FP32', 'measured', '2^17', '2^18')}
ROWS = [f'{loss}: {scale}' for loss, scales in SCALES.items() for scale in scales]
SEEDS = range(5)


def scaler_of(scale, model, batch, loss_func):
    "A scale by its name; without a word more it stays"
    if scale == 'measured': return StaticScaler.measured(model, batch, loss_func)
    number = 2.**int(scale.rpartition('2^')[2])
    return DynamicScaler(number) if scale.startswith('moving') else StaticScaler(number)


def run(row, seed):
    "Drawing error, accuracy on new digits, skipped steps, the scale"
    loss, _, scale = row.partition(': ')
    loss_func, eps = LOSSES[loss]
    data, model, step, S = drawings(), two_heads(seed), plain_step, 1.
    if scale != 'FP32':
        scaler = scaler_of(scale, model, next(batches(data, 256, 1, seed)), loss_func)
        step, S = MixedStep(scaler), scaler.scale.item()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3, eps=eps)
    with fp32_accumulate():
        history = fit(model, batches(data, 256, 150, seed), opt, loss_func, step)
    accuracy, error = heads_score(model, data)
    return dict(error=error, accuracy=accuracy, skipped=sum(history.get('skipped', [0])), scale=S)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
