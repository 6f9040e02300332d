"""Does it decide a training in which format the gradients are divided by the loss scale? (chapter
05)

The recipe's loop on the deep sigmoid net. A row says where line 3 divides; `S = 1` has no scale at
all.
"""
import copy

import torch
import torch.nn.functional as F

from mpcourse.tensorcore import fp32_accumulate
from mpcourse.toys import batches, deep_sigmoid, digits

ROWS = ('FP32', 'FP16', 'S = 1')
SEEDS = range(10)
STEPS = 400


@fp32_accumulate()
def run(row, seed):
    "Mean loss of the last 20 steps"
    S = 1. if row == 'S = 1' else 2.**11
    master = deep_sigmoid(seed)
    model, losses = copy.deepcopy(master).half(), []
    opt = torch.optim.Adam(master.parameters(), lr=6e-3)
    for x, y in batches(digits(), 128, STEPS, seed):
        loss = F.cross_entropy(model(x.half()).float(), y)
        (loss*S).backward()
        for m, p in zip(master.parameters(), model.parameters()):
            m.grad = (p.grad/S).float() if row == 'FP16' else p.grad.float()/S
            p.grad = None
        if all(m.grad.isfinite().all() for m in master.parameters()): opt.step()
        for m, p in zip(master.parameters(), model.parameters()): p.data.copy_(m)
        losses.append(loss.item())
    return dict(loss=sum(losses[-20:])/20)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
