"""What keeps a small net learning in four bits? (chapter 28)

Blocks, stochastic rounding of gradients, or a readout in FP32?

The net of the chapter's opening: eight symbols to the next one, 200 steps of 64 windows. Every
linear layer has operands in E2M1, with one scale for the tensor or one for sixteen numbers
(NVFP4). The loss is the mean of the last twenty.
"""
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from mpcourse.fourbits import FP4_RECIPES
from mpcourse.fp8 import CastConfig, Recipe, fp32_scale, simulate_fp8
from mpcourse.toys import char_text, fit, seeded

CAST = CastConfig('e2m1', scale=fp32_scale)
SCALES = {'one scale': Recipe(CAST, CAST, CAST), 'blocks': FP4_RECIPES['nvfp4_plain']}
ALONE = 'FP32, the gradient of the logits with one scale'
SYMBOLS = ALONE + ', the sum of each symbol restored'
OTHERS = ALONE + ', the sums given to other symbols'
WINDOWS = ALONE + ', the sum of each window restored'
BUT = 'one scale, the gradient of the logits in FP32'
ROWS = ['FP32', ALONE, SYMBOLS, OTHERS, WINDOWS, BUT] + [f'{scale}{more}' for scale in SCALES for more in ('', ', stochastic gradients', ', readout in FP32')]
SLOWER = ', rate 1e-3'
MIDDLE = ', rate 3e-3'
ROWS += [f'{name}{rate}' for rate in (SLOWER, MIDDLE) for name in ('FP32', 'one scale')]
ON = {', stochastic inputs and weights': 'xw', ', all stochastic': 'xwg'}
ROWS += [f'blocks{more}' for more in ON]
SEEDS = range(8)
STEPS = 200


def net(seed):
    "As the opening's"
    def block(): return [nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)]
    with seeded(seed): return nn.Sequential(nn.Embedding(96, 8), nn.Flatten(), nn.Linear(64, 64), *block(),
                                            nn.LayerNorm(64), nn.Linear(64, 96))


def cast_symbols(g):
    "Cast; then what each symbol's sum over the batch lost is given to all its entries alike"
    q = CAST(g)
    return q + (g - q).mean(0, keepdim=True)


def cast_windows(g):
    "Cast; then what each window's sum over the symbols lost is given to all its entries alike"
    q = CAST(g)
    return q + (g - q).mean(1, keepdim=True)


def cast_others(g):
    "As `cast_symbols`, and each symbol gets what another one lost"
    q = CAST(g)
    return q + (g - q).mean(0, keepdim=True)[:, torch.randperm(g.shape[1])]


CASTS = {ALONE: CAST, SYMBOLS: cast_symbols, OTHERS: cast_others, WINDOWS: cast_windows}


class CastGradient(torch.autograd.Function):
    "The gradient in E2M1, and nothing else"
    @staticmethod
    def forward(ctx, x, cast):
        ctx.cast = cast
        return x.clone()
    @staticmethod
    def backward(ctx, g): return ctx.cast(g), None


class CastForward(torch.autograd.Function):
    "The tensor in E2M1, and not its gradient"
    @staticmethod
    def forward(ctx, x): return CAST(x)
    @staticmethod
    def backward(ctx, g): return g


class Cast(nn.Module):
    "As a layer"
    def __init__(self, cast):
        super().__init__()
        self.cast = cast
    def forward(self, x): return CastGradient.apply(x, self.cast)


class Readout(nn.Linear):
    "Inputs and weights in E2M1; the gradient of the logits stays in FP32"
    def forward(self, x):
        return F.linear(CastForward.apply(x), CastForward.apply(self.weight), self.bias)


def isolated(row, seed):
    "The net in which the gradient of the logits alone is cast, or everything else"
    model = net(seed)
    if row in CASTS: return nn.Sequential(model, Cast(CASTS[row]))
    readout = Readout(64, 96)
    readout.load_state_dict(model[8].state_dict())
    model[8] = readout
    return simulate_fp8(model, SCALES['one scale'], keep='8')


def converted(row, seed):
    "The net of a row"
    if row in CASTS or row == BUT: return isolated(row, seed)
    name, _, more = row.partition(', ')
    if name == 'FP32': return net(seed)
    recipe = SCALES[name]
    if 'stochastic' in more:
        which = ON.get(f', {more}', 'g')
        recipe = replace(recipe, **{k: replace(getattr(recipe, k), rounding='stochastic') for k in which})
    return simulate_fp8(net(seed), recipe, keep='8' if 'readout' in more else ())


def run(row, seed):
    "Mean of the last twenty training losses"
    torch.manual_seed(seed)             # for stochastic rounding
    model = converted(row.removesuffix(SLOWER).removesuffix(MIDDLE), seed)
    windows, gen = char_text(9).train[0], torch.Generator().manual_seed(seed)
    data = (windows[torch.randint(len(windows), (64,), generator=gen)] for _ in range(STEPS))
    rate = float(row.partition(', rate ')[2] or .01)
    opt = torch.optim.Adam(model.parameters(), rate)
    losses = fit(model, ((w[:, :8], w[:, 8]) for w in data), opt, F.cross_entropy,
        schedule=lambda i: 1 - i/STEPS)['loss']
    return dict(loss=sum(losses[-20:])/20)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
