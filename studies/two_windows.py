"""At which loss scales does a net train in few bits, with ordinary and with unit-scaled ops?
(chapter 25)

The net of many_targets.py, 80 steps of 512 targets. A row is a form, the format of the gradients
that the linear layers get, and a loss scale, which is taken out of the gradients again in FP32.
Operands are in E4M3, with FP16 gradients in FP16. An infinity ends a run: nothing is skipped. The
rows of FP32 have no scale.
"""
import torch, torch.nn.functional as F

from many_targets import Regular, Unit, full
from mpcourse.rounding import quantize
from mpcourse.toys import char_text, seeded
from mpcourse.unit import unit_cross_entropy

FORMATS = {'FP16': ('fp16', 'fp16'), 'E5M2': ('e4m3', 'e5m2'), 'E4M3': ('e4m3', 'e4m3')}
EXPONENTS = range(-20, 29, 4)
ROWS = [f'{form}, FP32' for form in ('regular', 'unit-scaled')]
ROWS += [f'{form}, {fmt}: 2^{k}' for form in ('regular', 'unit-scaled') for fmt in FORMATS
         for k in EXPONENTS]
SEEDS = range(5)


class Product(torch.autograd.Function):
    "x @ w.T with operands in one format and its gradient in another"
    @staticmethod
    def forward(ctx, x, w, fmt, grad_fmt):
        x, w = (quantize(t, fmt, overflow='inf' if fmt == 'fp16' else 'saturate') for t in (x, w))
        ctx.save_for_backward(x, w)
        ctx.fmt = grad_fmt
        return x @ w.T

    @staticmethod
    def backward(ctx, g):
        (x, w), fmt = ctx.saved_tensors, ctx.fmt
        g = quantize(g, fmt, overflow='saturate' if fmt == 'e4m3' else 'inf')
        return g @ w, g.T @ x, None, None


def product_of(fmt):
    "The product of a row"
    if fmt == 'FP32': return full
    return lambda x, w: Product.apply(x, w, *FORMATS[fmt])


def run(row, seed):
    "Loss on new text"
    form, rest = row.split(', ')
    fmt, _, k = rest.partition(': 2^')
    data, gen, scale = char_text(9), torch.Generator().manual_seed(seed), 2.**int(k or 0)
    (x, _), (new, _) = data.train, data.valid
    with seeded(seed): model = (Unit if form == 'unit-scaled' else Regular)(product_of(fmt))
    loss_func, lr = (unit_cross_entropy, .15) if form == 'unit-scaled' else (F.cross_entropy, .02)
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(80):
        windows = x[torch.randint(len(x), (512,), generator=gen)]
        opt.zero_grad()
        (loss_func(model(windows[:, :8]), windows[:, 8])*scale).backward()
        for p in model.parameters(): p.grad /= scale
        opt.step()
    with torch.no_grad(): return dict(loss=F.cross_entropy(model(new[:2048, :8]), new[:2048, 8]))


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
