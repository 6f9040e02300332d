"""Weights in four bits: round after training, or train on the grid? (chapter 28)

The opening's net is trained in FP32 for 400 steps. All its linear layers then get weights on MXFP4's
grid, and products in MXFP8. *Rounded* stops there. The others go on for 100 steps at a tenth of the
rate: in FP32 and are rounded then; on the grid, with a straight-through gradient (quantization-aware
training); or on the grid with the FP32 net's distribution as the target (distillation). The last
row is on the grid from the first step. The loss is that on other text.
"""
from copy import deepcopy
from functools import lru_cache

import torch, torch.nn.functional as F
from torch import nn

from four_scales import net
from mpcourse.fp8 import CastConfig, RECIPES, e8m0_ceil, fp8_linear
from mpcourse.toys import char_text, fit

GRID = CastConfig('e2m1', (1, 32), e8m0_ceil)
ROWS = ['FP32', 'FP32, longer', 'rounded', 'FP32 longer, then rounded', 'on the grid', 'on the grid, distilled', 'on the grid from the start']
SEEDS = range(10)


class OnGrid(nn.Linear):
    "Weights in MXFP4, their gradient goes straight through; products in MXFP8"
    def forward(self, x):
        w = self.weight + (GRID(self.weight) - self.weight).detach()
        return fp8_linear(x, w, self.bias, RECIPES['mx'])


def on_grid(model):
    model = deepcopy(model)
    for m in model.modules():
        if type(m) is nn.Linear: m.__class__ = OnGrid
    return model


def train(model, seed, steps, rate, teacher=None):
    "Some steps at a rate that falls to zero"
    windows, gen = char_text(9).train[0], torch.Generator().manual_seed(seed)
    def drawn():
        for _ in range(steps):
            w = windows[torch.randint(len(windows), (64,), generator=gen)]
            yield w[:, :8], w if teacher else w[:, 8]
    def distil(logits, w):
        with torch.no_grad(): target = teacher(w[:, :8]).log_softmax(-1)
        return F.kl_div(logits.log_softmax(-1), target, reduction='batchmean', log_target=True)
    opt = torch.optim.Adam(model.parameters(), rate)
    fit(model, drawn(), opt, distil if teacher else F.cross_entropy, schedule=lambda i: 1 - i/steps)
    return model


@lru_cache(2)
def trained(seed): return train(net(seed), seed, 400, .01)


def model_of(row, seed):
    base = trained(seed)
    if row == 'FP32': return base
    if row == 'rounded': return on_grid(base)
    if row == 'on the grid from the start': return train(on_grid(net(seed)), seed, 400, .01)
    teacher = base if 'distilled' in row else None
    start = on_grid(base) if row.startswith('on the grid') else deepcopy(base)
    model = train(start, 1000 + seed, 100, .001, teacher)
    return on_grid(model) if 'then rounded' in row else model


@torch.no_grad()
def run(row, seed):
    "The loss on other text"
    with torch.enable_grad(): model = model_of(row, seed)
    other = char_text(9).valid[0][:2048]
    return dict(loss=F.cross_entropy(model(other[:, :8]), other[:, 8]).item())


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
