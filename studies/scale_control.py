"""Can another learning rate replace the loss scale? (chapter 08)

A row is a learning rate and FP32, or the recipe of chapter 05 at a scale of 1 or 2^11, or both
passes in BF16 without a scale: the deep sigmoid net, Adam, 200 steps. A seed has learnt when its
loss ends 0.05 below the 2.30 of guessing.
"""
import math

import torch

from mpcourse.recipe import train_fp16
from mpcourse.tensorcore import fp32_accumulate
from mpcourse.toys import batches, cross_entropy, deep_sigmoid, digits, fit, half_pass, plain_step

RATES = (2e-3, 4e-3, 6e-3)
SCALES = {'FP32': None, 'S = 1': 1., 'S = 2^11': 2.**11, 'BF16': None}
ROWS = {f'lr {lr:g}, {name}': (lr, S) for lr in RATES for name, S in SCALES.items()}
STEPS = {'FP32': plain_step, 'BF16': half_pass(torch.bfloat16)}
SEEDS = range(10)


def run(row, seed):
    "Final loss, and whether it learnt"
    lr, S = ROWS[row]
    net, data = deep_sigmoid(seed), batches(digits(), 128, 200, seed)
    opt = torch.optim.Adam(net.parameters(), lr=lr)
    with fp32_accumulate():
        if S: losses = train_fp16(net, opt, data, cross_entropy, S)
        else: losses = fit(net, data, opt, step=STEPS[row.split(', ')[1]])['loss']
    loss = sum(losses[-20:])/20
    return dict(loss=loss, learnt=loss < math.log(10) - .05)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
