"""Which lines of the recipe does a training need? (chapter 05)

The recipe's loop on the net with two heads, 150 steps. A row damages a line, changes the factor, or
is an alternative: BF16, or FP32 without the recipe. The values: the mean loss of the last 20 steps,
accuracy and error of the drawings on new digits, and skipped steps.
"""
import copy

import torch

from mpcourse.tensorcore import fp32_accumulate
from mpcourse.toys import batches, drawings, heads_loss, heads_score, two_heads

SCALES = {'FP32': 1., 'recipe': 2.**12, 'divided in FP16': 2.**12, 'never cleared': 2.**12, 'S = 2^16': 2.**16,
          'S = 2^20': 2.**20, 'S = 1': 1., 'BF16, S = 1': 1.}
DTYPES = {'FP32': torch.float32, 'BF16, S = 1': torch.bfloat16}
ROWS = list(SCALES)
SEEDS = range(10)
STEPS = 150


@fp32_accumulate()
def run(row, seed):
    "What the net has learnt"
    S, dtype, data = SCALES[row], DTYPES.get(row, torch.float16), drawings()
    master = two_heads(seed)
    model, losses, skipped = copy.deepcopy(master).to(dtype), [], 0
    opt = torch.optim.Adam(master.parameters(), lr=3e-3)
    for x, y in batches(data, 256, STEPS, seed):
        loss = heads_loss(model(x.to(dtype)).float(), y)
        (loss*S).backward()
        for m, p in zip(master.parameters(), model.parameters()):
            m.grad = (p.grad/S).float() if row == 'divided in FP16' else p.grad.float()/S
            if row != 'never cleared': p.grad = None
        if all(m.grad.isfinite().all() for m in master.parameters()): opt.step()
        else: skipped += 1
        for m, p in zip(master.parameters(), model.parameters()): p.data.copy_(m)
        losses.append(loss.item())
    accuracy, error = heads_score(master, data)
    return dict(loss=sum(losses[-20:])/20, accuracy=accuracy, error=error, skipped=skipped)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
