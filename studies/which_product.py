"""Which of the three products of which layers breaks four bits? (chapter 28)

A linear layer has three products: *forward* (input, weight), *back* (gradient, weight: what goes
into the body) and *weight* (gradient, input: the weight's gradient). A row names the net, the
cast, the layers whose products take cast operands, and which of the three do; the others are FP32.

Nets: *text*, the opening's; *outlier*, the same, but one feature of each layer's input is cast 2^8
times larger, and its weights 2^8 times smaller, so that in FP32 it trains as *text* does; *gpt*, the
course's GPT; *heads*, the net that reads a digit and draws it. The score is the mean of the last
twenty training losses; for the heads the error of the drawing on new data.
"""
import math
from functools import partial
from itertools import combinations

import torch
from torch import nn

from every_scheme import heads
from four_scales import net
from mpcourse.compare import Training, toy_training
from mpcourse.fourbits import nvfp4_scale, rotate16
from mpcourse.fp8 import CastConfig, e8m0_ceil, fp32_scale
from mpcourse.rounding import quantize
from mpcourse.toys import char_text, cross_entropy, fit

PRODUCTS = 'forward', 'back', 'weight'
SETS = ['+'.join(c) for n in (1, 2, 3) for c in combinations(PRODUCTS, n)]
ALL = SETS[-1]


def both(a, b, cast, of_a=None):
    "Operands of a @ b.T, cast along their sum; a is the gradient where the product has one"
    return (of_a or cast)(a), cast(b)


def turned(a, b, cast, signs):
    "Both operands rotated by sixteens before the cast; their product is the same"
    return cast(rotate16(a*signs(a))), cast(rotate16(b*signs(b)))


def rotated(a, b, cast):
    "As NVIDIA's recipe: the same signs in every step"
    return turned(a, b, cast, torch.ones_like)


def randomly_rotated(a, b, cast):
    "New signs for each product"
    signs = torch.randint(2, (a.shape[-1],))*2. - 1
    return turned(a, b, cast, lambda _: signs)


def eden(x):
    """MS-EDEN (arXiv 2601.22813): to nearest, then each scale is lengthened so that what was rounded
    away is made up for along x; the new scale is rounded to E4M3 by chance. For rotated numbers"""
    tiles, fmt = x.unflatten(-1, (-1, 16)), 'e2m1'
    shared = tiles.abs().max()/6/256            # room for longer scales
    scale = quantize((tiles.abs().amax(-1, True)/6/shared).clamp(min=2.**-6), 'e4m3')
    q = quantize(tiles/scale/shared, fmt)
    inner = (tiles*q*scale*shared).sum((-2, -1), keepdim=True)
    longer = torch.where(inner > 0, (tiles*tiles).sum((-2, -1), keepdim=True)/inner, 1.)
    return (q*quantize(scale*longer, 'e4m3', 'stochastic')*shared).flatten(-2)


def four_over_six(amax, top, fmt, tiles):
    "As chapter 28's: the largest number of a block becomes 6 or 4, whichever has the smaller error"
    scales = [nvfp4_scale(amax*k, top*448/256, fmt) for k in (1, 1.5)]
    errors = [((quantize(tiles/s, fmt)*s - tiles)**2).sum((-3, -1), keepdim=True) for s in scales]
    return torch.where(errors[1] < errors[0], scales[1], scales[0])


def cast_of(scale, tile=(1, 16), rounding='nearest'): return CastConfig('e2m1', tile, scale, rounding)


ONE, NV, MX = cast_of(fp32_scale, None), cast_of(nvfp4_scale), cast_of(e8m0_ceil, (1, 32))
FORMS = {'one scale': partial(both, cast=ONE), 'MXFP4': partial(both, cast=MX), 'NVFP4': partial(both, cast=NV)}
CURES = {}
for name, cast in (('MXFP4', MX), ('NVFP4', NV)):
    by_chance = CastConfig('e2m1', cast.tile, cast.scale, 'stochastic')
    CURES |= {f'{name}, stochastic': partial(both, cast=cast, of_a=by_chance),
              f'{name}, rotated': partial(rotated, cast=cast),
              f'{name}, randomly rotated': partial(randomly_rotated, cast=cast),
              f'{name}, randomly rotated and stochastic': partial(randomly_rotated, cast=by_chance)}
CURES |= {'NVFP4, weights in square tiles': partial(both, cast=cast_of(nvfp4_scale, (16, 16)), of_a=NV),
          'NVFP4, four over six': partial(both, cast=cast_of(four_over_six)),
          'NVFP4, MS-EDEN': partial(randomly_rotated, cast=eden)}


class Product(torch.autograd.Function):
    "x @ w.T; of its three products those that are named take cast operands"
    @staticmethod
    def forward(ctx, x, w, names, how):
        ctx.save_for_backward(x, w)
        ctx.names, ctx.how = names, how
        a, b = how['forward'](x, w) if 'forward' in names else (x, w)
        return a @ b.T

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        a, b = ctx.how['back'](g, w.T) if 'back' in ctx.names else (g, w.T)
        c, d = ctx.how['weight'](g.T, x.T) if 'weight' in ctx.names else (g.T, x.T)
        return a @ b.T, c @ d.T, None, None


class Few(nn.Linear):
    "A linear layer some of whose products are in four bits"
    names, how, outlier = (), None, 1.
    def forward(self, x):
        stretch = torch.ones(self.in_features)
        stretch[7] = self.outlier
        y = Product.apply(x.flatten(0, -2)*stretch, self.weight/stretch, self.names, self.how)
        y = y.view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


def convert(model, layers, names, how, readout, outlier):
    "Give the products of `layers` (all, body or readout) cast operands"
    for name, m in model.named_modules():
        last = name in readout
        if type(m) is not nn.Linear or layers != 'all' and last != (layers == 'readout'): continue
        m.__class__, m.names, m.how, m.outlier = Few, names, how, outlier
    return model


def text(seed):
    "The net and the batches of the chapter's opening"
    def drawn(steps=200):
        windows, gen = char_text(9).train[0], torch.Generator().manual_seed(seed)
        for _ in range(steps):
            w = windows[torch.randint(len(windows), (64,), generator=gen)]
            yield w[:, :8], w[:, 8]
    return Training(net(seed), partial(torch.optim.Adam, lr=.01), cross_entropy, drawn, None, lambda i: 1 - i/200)


NETS = {'text': (text, ('8',)), 'outlier': (text, ('8',)),
        'gpt': (lambda seed: toy_training('char_lm', seed, 100), ('head',)),
        'heads': (heads, ('name', 'draw.4'))}
ROWS = [f'{name}: FP32' for name in ('text', 'gpt', 'heads')]
ROWS += [f'text: {form}; {layers}; {names}' for form in FORMS for layers in ('all', 'readout', 'body') for names in SETS]
ROWS += [f'outlier: {form}; all; {names}' for form in FORMS for names in SETS]
ROWS += [f'gpt: {form}; {layers}; {names}' for form in ('one scale', 'MXFP4') for layers in ('all', 'readout') for names in SETS]
ROWS += [f'heads: {form}; all; {names}' for form in ('one scale', 'MXFP4') for names in SETS]
ROWS += [f'{name}: {cure}; all; {names}' for name in ('text', 'outlier') for cure in CURES for names in (ALL, 'weight')
         if not ('square' in cure and names == 'weight')]
SEEDS = range(10)


def hows(form):
    "The casts of each product; a rotation is for the weight's gradient, as in NVIDIA's recipe"
    if form in FORMS: return dict.fromkeys(PRODUCTS, FORMS[form])
    plain = FORMS[form.partition(',')[0]]
    backward_only = 'stochastic' in form or 'EDEN' in form
    weight_only = 'rotated' in form and 'EDEN' not in form
    if 'square' in form: return dict(forward=CURES[form], back=CURES[form], weight=plain)
    return dict(forward=plain if backward_only or weight_only else CURES[form],
                back=plain if weight_only else CURES[form], weight=CURES[form])


def run(row, seed):
    "Mean of the last twenty training losses, or the error of the drawing"
    torch.manual_seed(seed)             # for stochastic rounding and random signs
    name, _, scheme = row.partition(': ')
    make, readout = NETS[name]
    t = make(seed)
    if scheme != 'FP32':
        form, layers, names = scheme.split('; ')
        convert(t.model, layers, names.split('+'), hows(form), readout,
                2.**8 if name == 'outlier' else 1.)
    losses = fit(t.model, t.batches(), t.opt(t.model.parameters()), t.loss_func, schedule=t.schedule)['loss']
    score = t.score(t.model) if name == 'heads' else sum(losses[-20:])/20
    return dict(score=score if math.isfinite(score) else math.inf)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
