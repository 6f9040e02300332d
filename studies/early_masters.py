"""Do masters that are taken before the weights are rounded train better than those taken after?
(chapter 07)

A row says when the FP32 copy is taken. A training of the deep sigmoid net has 300 steps of 128
digits, S = 2^11.
"""
import torch, torch.nn.functional as F

from mpcourse.recipe import train_fp16
from mpcourse.tensorcore import fp32_accumulate
from mpcourse.toys import batches, deep_sigmoid, digits

ROWS = ['before rounding', 'after rounding']
SEEDS = range(10)


def run(row, seed):
    "Mean of the last 20 losses"
    master = deep_sigmoid(seed)
    if row == 'after rounding': master = master.half().float()
    opt = torch.optim.Adam(master.parameters(), lr=6e-3)
    with fp32_accumulate():
        losses = train_fp16(master, opt, batches(digits(), 128, 300, seed), F.cross_entropy)
    return dict(loss=sum(losses[-20:])/20)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
