"""Does weight decay decide whether the best rate of a narrow net fits a wide one? (chapter 26)

The transformer of `rate_transfer.py`, with AdamW, at 150 and at 1,500 steps. The rate of a matrix
is the same at all widths ("one rate") or shrinks with the width ("rate × 32/width"). The decay is
none, coupled (torch's AdamW: rate × .1 a step, so that it shrinks with the rate) or independent (a
share of 2^-5 × .1 a step at the schedule's top, whatever the rate and the width; Kosson et al. 2025,
arXiv 2510.19093). A row's numbers are the losses on new text for a range of rates.
"""
import torch, torch.nn.functional as F

from mpcourse.toys import batches, char_text, warmup_cosine
from rate_transfer import factor, net

WIDTHS, SEEDS, STEPS = (32, 128), range(5), (150, 1500)
RULES = {'one rate': 'regular, one rate', 'rate × 32/width': 'regular, rate × 32/width'}
EXPONENTS = {'one rate': range(-10, -3), 'rate × 32/width': range(-8, -2)}
DECAYS = 'none', 'coupled', 'independent'
STRENGTH, TYPICAL = .1, 2.**-5      # AdamW's argument, and the rate at which the two decays agree
ROWS = [f'{rule}, {decay}, {steps} steps: {d}' for steps in STEPS for rule in RULES for decay in DECAYS for d in WIDTHS]


def groups(model, rule, decay, d, lr):
    "AdamW's parameter groups: embeddings do not decay"
    made = []
    for m in model.modules():
        for p in m.parameters(recurse=False):
            if not p.requires_grad: continue
            rate = lr*factor(RULES[rule], d, m, p)
            strength = STRENGTH*TYPICAL/rate if decay == 'independent' else STRENGTH
            if decay == 'none' or isinstance(m, torch.nn.Embedding): strength = 0.
            made.append(dict(params=[p], lr=rate, weight_decay=strength))
    return made


def train(rule, decay, steps, d, lr, seed):
    "Loss on new text"
    model, data = net(RULES[rule], d, seed), char_text(32)
    opt = torch.optim.AdamW(groups(model, rule, decay, d, lr), betas=(.9, .99), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, warmup_cosine(steps, 20))
    for x, y in batches(data, 8, steps, seed):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        schedule.step()
    x, y = [t[::5] for t in data.valid]
    with torch.no_grad(): return F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item()


def run(row, seed):
    "Loss on new text, rate by rate"
    what, d = row.rsplit(': ', 1)
    rule, decay, steps = what.removesuffix(' steps').rsplit(', ', 2)
    return {f'2^{k}': train(rule, decay, int(steps), int(d), 2.**k, seed) for k in EXPONENTS[rule]}


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
