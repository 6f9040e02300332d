"""Which lines of the recipe does a training need? (chapter 05)

The recipe's loop on the deep sigmoid net, 300 steps. A row damages a line, changes the factor, or
is an alternative to it: other first weights, or BF16.
"""
import copy
from functools import partial

import torch, torch.nn.functional as F
from torch import nn

from mpcourse.tensorcore import fp32_accumulate
from mpcourse.toys import batches, deep_sigmoid, digits, seeded

SCALES = {'recipe': 2.**11, 'divided in FP16': 2.**11, 'never cleared': 2.**11, 'S = 2^16': 2.**16,
          'S = 2^20': 2.**20, 'S = 1': 1., 'S = 1, Xavier, gain 1': 1., 'S = 1, Xavier, gain 4': 1.,
          'BF16, S = 1': 1.}
ROWS = list(SCALES)
SEEDS = range(10)
STEPS = 300


def xavier(seed, gain):
    "The deep sigmoid net with Xavier's first weights"
    net = deep_sigmoid(seed)
    with seeded(seed):
        for layer in net:
            if not isinstance(layer, nn.Linear): continue
            nn.init.xavier_normal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)
    return net


NETS = {f'S = 1, Xavier, gain {gain}': partial(xavier, gain=gain) for gain in (1, 4)}


@fp32_accumulate()
def run(row, seed):
    "Mean loss of the last 20 steps, and skipped steps"
    S, dtype = SCALES[row], torch.bfloat16 if row.startswith('BF16') else torch.float16
    master = NETS.get(row, deep_sigmoid)(seed)
    model, losses, skipped = copy.deepcopy(master).to(dtype), [], 0
    opt = torch.optim.Adam(master.parameters(), lr=6e-3)
    for x, y in batches(digits(), 128, STEPS, seed):
        loss = F.cross_entropy(model(x.to(dtype)).float(), y)
        (loss*S).backward()
        for m, p in zip(master.parameters(), model.parameters()):
            m.grad = (p.grad/S).float() if row == 'divided in FP16' else p.grad.float()/S
            if row != 'never cleared': p.grad = None
        if all(m.grad.isfinite().all() for m in master.parameters()): opt.step()
        else: skipped += 1
        for m, p in zip(master.parameters(), model.parameters()): p.data.copy_(m)
        losses.append(loss.item())
    return dict(loss=sum(losses[-20:])/20, skipped=skipped)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
