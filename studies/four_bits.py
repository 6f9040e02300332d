"""Which part of a recipe for four bits does a small net on text need? (chapter 28)

Eight symbols to the next one: an embedding, a linear layer, two residual blocks, a readout; no
attention. 400 steps of 64 windows; the loss on 2,048 other windows. Every linear layer in four
bits; `readout in FP32` leaves the last one out; `loss scale` is the sceptic's remedy: one constant
in place of the tensor's number. A batch of 48 is no power of two.
"""
from dataclasses import replace
from functools import lru_cache, partial

import torch, torch.nn.functional as F

from mpcourse.fourbits import FP4_RECIPES
from mpcourse.fp8 import RECIPES, e8m0_floor, fp8_matmul
from mpcourse.rounding import quantize
from mpcourse.toys import char_text

FULL, PLAIN, MX, FLOOR = [FP4_RECIPES[k] for k in ('nvfp4', 'nvfp4_plain', 'mxfp4', 'mxfp4_floor')]


def block_scale(amax, top, fmt, tiles):
    "A scale in E4M3 for each tile, and none for the tensor"
    return quantize((amax/fmt.max).clamp(min=2.**-9), 'e4m3')


def even_scale(amax, top, fmt, tiles):
    "torchao's EVEN: the largest number is rounded to E2M1's digits before its exponent is taken"
    return e8m0_floor(quantize(amax, 'e8m1'), top, fmt)


def with_scale(recipe, scale):
    return replace(recipe, **{k: replace(getattr(recipe, k), scale=scale) for k in 'xwg'})
def with_rounding(recipe, how): return replace(recipe, g=replace(recipe.g, rounding=how))
def with_rows(recipe): return replace(recipe, w=replace(recipe.w, tile=(1, 16)))
def without_rotation(recipe): return replace(recipe, transform=None)


FORMS = {'FP32': None, 'FP8, mx': RECIPES['mx'], 'NVFP4': FULL,
         'NVFP4 without stochastic rounding': with_rounding(FULL, 'nearest'),
         'NVFP4 without Hadamard': without_rotation(FULL), 'NVFP4 without 2D': with_rows(FULL),
         'NVFP4 without tensor scale': with_scale(FULL, block_scale),
         'NVFP4, plain': PLAIN, 'NVFP4, stochastic only': with_rounding(PLAIN, 'stochastic'),
         'NVFP4, Hadamard only': replace(PLAIN, transform=FULL.transform),
         'MXFP4 up, nearest': with_rounding(MX, 'nearest'), 'MXFP4 up, stochastic': MX,
         'MXFP4 floor, nearest': FLOOR, 'MXFP4 floor, stochastic': with_rounding(FLOOR, 'stochastic'),
         'MXFP4 even, nearest': with_scale(FLOOR, even_scale),
         'MXFP4 even, stochastic': with_rounding(with_scale(FLOOR, even_scale), 'stochastic')}
KEPT = ['NVFP4', 'NVFP4 without stochastic rounding', 'NVFP4 without tensor scale', 'NVFP4, plain',
        'MXFP4 up, nearest',
        'MXFP4 floor, nearest']
SCALED = [f'NVFP4 without tensor scale; loss scale 2^{k}' for k in (10, 13)]
BOTH = [k for k in FORMS if k.startswith('MXFP4')]
ROWS = list(FORMS) + [f'{k}; readout in FP32' for k in KEPT] + SCALED + [f'{k}; batch 48' for k in ('FP32', *BOTH)]
SEEDS = range(8)


def product_of(recipe):
    return torch.matmul if recipe is None else partial(fp8_matmul, recipe=recipe)


class Nets:
    "Nets for all seeds, side by side: each tensor has a first dimension for the seed"
    def __init__(self, seeds, d=64):
        shapes = dict(emb=(96, 8), inp=(64, d), up0=(d, 2*d), down0=(2*d, d), up1=(d, 2*d),
                      down1=(2*d, d), head=(d, 96))
        gens = [torch.Generator().manual_seed(s) for s in seeds]
        def draw(name, a, b):
            size = 1. if name == 'emb' else (3*a)**-.5
            return (size*torch.stack([torch.randn(a, b, generator=g)
                                      for g in gens])).requires_grad_()
        self.params, self.n = {name: draw(name, *shape) for name, shape in shapes.items()}, len(gens)

    def __call__(self, x, product, head):
        "Windows (seeds, n, 8) to logits (seeds, n, 96)"
        p, each = self.params, 96*torch.arange(self.n)[:, None, None]
        h = product(F.embedding(x + each, p['emb'].flatten(0, 1)).flatten(2), p['inp'])
        for k in '01':
            up = product(F.layer_norm(h, h.shape[-1:]), p['up' + k])
            h = h + product(F.gelu(up), p['down' + k])
        return head(F.layer_norm(h, h.shape[-1:]), p['head'])


@lru_cache(None)
def losses(row, steps=400, lr=.01):
    "The loss of each seed's net on other text"
    torch.manual_seed(0)                # for stochastic rounding
    form, _, kept = row.partition('; ')
    product = product_of(FORMS[form])
    head, scale = torch.matmul if 'readout' in kept else product, 2.**int(kept.partition('2^')[2] or 0)
    data, nets = char_text(9), Nets(SEEDS)
    n = 48 if 'batch' in kept else 64
    windows, other = data.train[0], data.valid[0][:2048].expand(len(SEEDS), -1, -1)
    gens = [torch.Generator().manual_seed(s) for s in SEEDS]
    opt = torch.optim.Adam(nets.params.values(), lr)
    schedule = torch.optim.lr_scheduler.LinearLR(opt, 1., 0., steps)
    for _ in range(steps):
        w = torch.stack([windows[torch.randint(len(windows), (n,), generator=g)] for g in gens])
        opt.zero_grad()
        logits = nets(w[..., :8], product, head)
        loss = F.cross_entropy(logits.flatten(0, 1), w[..., 8].flatten(),
                               reduction='none').view(len(gens), -1).mean(1).sum()
        (loss*scale).backward()
        for p in nets.params.values(): p.grad /= scale
        opt.step()
        schedule.step()
    with torch.no_grad(): logits = nets(other[..., :8], product, head)
    return [F.cross_entropy(z, y[:, 8]).item() for z, y in zip(logits, other)]


def run(row, seed):
    "The loss on other text"
    return dict(loss=losses(row)[seed])


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
