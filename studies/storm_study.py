"""Which policies bring the two towers through ten bad batches? (chapter 16)

A row is a policy and the step at which the storm begins. All but two start from 2^16; the loss is divided
by 1,024, as a mean over so many micro-batches would divide it. Learnt: the loss ends below 1.5.
`measured` is the power of two that lifts the largest gradient of the first batch to 2^13.
"""
from dataclasses import replace

import torch
from mpcourse.dynamic import DynamicScaler
from mpcourse.scaler import StaticScaler
from mpcourse.simulator import fly, hard_batches
from mpcourse.step import MixedStep
from mpcourse.toys import batches, contrastive, get_toy


def scaled_down(pred, y):
    "The loss that is trained"
    return contrastive(pred, y)/1024


TOWERS = replace(get_toy('two_towers'), loss_func=scaled_down)


def grows(interval, **kw):
    "Torch's policy, impatient"
    return DynamicScaler(growth_interval=interval, hold=False, **kw)


def measured(seed):
    "A scale measured on the first batch"
    first = next(iter(batches(TOWERS.data(), TOWERS.bs, 1, seed)))
    return StaticScaler.measured(TOWERS.model(seed), first, scaled_down)


BF16 = MixedStep(StaticScaler(1.), torch.bfloat16, clip=1.)
ROWS = {'FP32': ('fp32', 30), 'torch, no storm': ('torch', None), 'torch': ('torch', 30),
        'Megatron': ('megatron', 30), 'metaseq': ('metaseq', 30), 'interval 100': (grows(100), 30),
        'interval 10': (grows(10), 30), 'interval 1': (grows(1), 30),
        'tuned: from 2^24, interval 50': (grows(50, init_scale=2.**24), 30),
        'static 2^16': (StaticScaler(2.**16), 30), 'measured': (measured, 30), 'BF16': (BF16, 30),
        'floor 2^12': (DynamicScaler(min_scale=2.**12, hold=False), 30), 'hold': (DynamicScaler(), 30),
        'FP32, at 300': ('fp32', 300), 'torch, at 300': ('torch', 300),
        'Megatron, at 300': ('megatron', 300)}
OWN_START = ('tuned: from 2^24, interval 50', 'measured')
SEEDS = range(5)


def run(row, seed):
    "Final loss, whether it learnt, zeros of the first layer, lowest and last log2 scale, skipped steps"
    pilot, at = ROWS[row]
    pilot = pilot(seed) if pilot is measured else pilot
    n = 10 if at else 0
    storm = hard_batches(n, at or 0, after=TOWERS.steps - (at or 0) - n)
    flight = fly(TOWERS, {row: pilot}, storm, start=None if row in OWN_START else 2.**16, seed=seed)
    end = {k: float(v) for k, v in flight.table().loc[row].items()}
    rest = {k: end[k] for k in ('zeros', 'lowest', 'end', 'skipped')}
    return dict(loss=1024*end['loss'], learnt=1024*end['loss'] < 1.5, **rest)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
