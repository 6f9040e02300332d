"""Where does a rounding decide, and always the same way? (chapter 31)

`positions`: one attention layer with rotary positions learns to say what stood three places
before; its 64 places start at P. The angles are computed in a format. `ties`: one attention in
BF16 over 4,000 queries; k keys share the largest score. `shared`: how many of 20,000 queries have
two keys with the largest score, if scores are normal numbers? `choice`: 8 of 256 experts for 4,096
tokens; the scores are random numbers, and no router is trained. `counts`: tokens of each of 256
experts, counted by 64 ranks and summed in BF16. `balance`: the bias that balances 32 experts,
moved by .001 a step for 3,000 steps. Everything else computes in FP32.
"""
import math

import torch
import torch.nn.functional as F
from torch import nn

from mpcourse.rounding import quantize
from mpcourse.toys import seed, seeded

def exact(x): return x
def bf16(x): return x.bfloat16().float()
def fp16(x): return x.half().float()

POSITIONS = {f'FP32, from {p:,}': dict(start=p) for p in (0, 4096, 16384)}
POSITIONS |= {f'BF16, from {p:,}': dict(start=p, position=bf16, angle=bf16, table=bf16)
              for p in (0, 256, 1024, 4096, 16384)}
POSITIONS |= {
    'from 4,096, only the position in BF16': dict(position=bf16), 'from 4,096, only the angle in BF16': dict(angle=bf16),
    'from 4,096, only the frequencies in BF16': dict(frequency=bf16),
    'from 4,096, sine and cosine in BF16': dict(table=bf16), 'from 4,096, all but the angles in BF16': dict(rest=bf16),
    'FP16, from 4,096': dict(position=fp16, angle=fp16),
    'BF16, from 0, 384 places': dict(start=0, position=bf16, angle=bf16, table=bf16, length=384), 'FP32, from 0, 384 places': dict(start=0, length=384)}
TIES = {f'{k} at the maximum': dict(ties=k) for k in (1, 2, 3)}
TIES |= {'2 at the maximum, FP32 result': dict(how='fp32'),
         '2 at the maximum, rounded by chance': dict(how='chance'),
         '2 at the maximum, larger maximum': dict(how='larger'), '2 at the maximum, FP32 sum, rounded once': dict(how='once'),
         '2 at the maximum, larger rest': dict(rest=-3.), '2 at the maximum, FP16': dict(how='fp16')}
SHARED = {f'{name} scores, {n:,} keys': dict(cast=cast, keys=n)
          for name, cast in dict(BF16=bf16, FP16=fp16, FP32=exact).items() for n in (64, 1024)}
CHOICE = {'softmax': dict(score='softmax'), 'sigmoid': dict(score='sigmoid'),
          'sigmoid, FP32 from the logits on': dict(score='sigmoid', given=exact),
          'softmax, FP16': dict(score='softmax', cast=fp16, given=fp16), 'sigmoid, FP16': dict(score='sigmoid', cast=fp16, given=fp16),
          'logits, no sigmoid': dict(score='logits')}
COUNTS = {'BF16': dict(cast=bf16), 'FP16': dict(cast=fp16), 'FP32': dict(cast=exact),
          'BF16, 640 subtracted before': dict(cast=bf16, less=640),
          'BF16, totals spread by a tenth': dict(cast=bf16, spread=64)}
BALANCE = {'FP32': {}, 'BF16 bias': dict(cast=bf16),
           'BF16 bias, rounded by chance': dict(cast='chance'),
           'FP16 bias': dict(cast=fp16), 'BF16 bias, rate .004': dict(cast=bf16, rate=4e-3), 'FP32, rate .004': dict(rate=4e-3)}
KINDS = dict(positions=POSITIONS, ties=TIES, shared=SHARED, choice=CHOICE, counts=COUNTS,
             balance=BALANCE)
ROWS = {f'{kind}: {name}': (kind, kw) for kind, rows in KINDS.items() for name, kw in rows.items()}
SEEDS = range(10)

WIDTH, SYMBOLS, BACK = 64, 32, 3


def turned(x, cos, sin):
    "Rotate the pairs of the two halves"
    a, b = x.chunk(2, -1)
    return torch.cat([a*cos - b*sin, a*sin + b*cos], -1)


def positions(number, start=4096, position=exact, frequency=exact, angle=exact, table=exact,
              rest=exact, length=64, steps=250):
    "Accuracy over the last ten steps, and that of the last quarter of the places"
    g = torch.Generator().manual_seed(seed(number))
    with seeded(number):
        symbol, qkv, out = nn.Embedding(SYMBOLS, WIDTH), nn.Linear(WIDTH, 3*WIDTH), nn.Linear(WIDTH, SYMBOLS)
    opt = torch.optim.Adam([p for m in (symbol, qkv, out) for p in m.parameters()], 1e-2)
    turns = frequency(1/10000**(torch.arange(0, WIDTH, 2)/WIDTH))
    places = position(start + torch.arange(length).float())
    angles = angle(places[:, None]*turns)
    cos, sin = table(angles.cos()), table(angles.sin())
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    right = []
    for _ in range(steps):
        x = torch.randint(SYMBOLS, (2048//length, length), generator=g)
        q, k, v = rest(qkv(symbol(x))).chunk(3, -1)
        scores = rest(turned(q, cos, sin)) @ rest(turned(k, cos, sin)).mT*WIDTH**-.5
        y = out(rest(scores.masked_fill(future, -math.inf).softmax(-1) @ v))[:, BACK:]
        right.append((y.argmax(-1) == x[:, :-BACK]).float().mean(0))
        opt.zero_grad()
        F.cross_entropy(y.flatten(0, 1), x[:, :-BACK].flatten()).backward()
        opt.step()
    by_place = torch.stack(right[-10:]).mean(0)
    return dict(accuracy=by_place.mean().item(), late=by_place[-length//4:].mean().item())


def ties(number, ties=2, how='bf16', rest=-12., keys=64, width=64, queries=4000):
    "Root mean square and mean of the relative error, and the share of it that a mean over the queries leaves"
    g = torch.Generator().manual_seed(seed(number))
    store = fp16 if how == 'fp16' else bf16
    # of one sign, as in a channel with a large mean
    values = store(-1 - torch.rand(keys, width, generator=g))
    scores = rest - 3*torch.rand(queries, keys, generator=g)
    places = torch.stack([torch.randperm(keys, generator=g)[:ties] for _ in range(queries)])
    top = .5 + 3*torch.rand(queries, 1, generator=g)
    scores[torch.arange(queries)[:, None], places] = top.expand(-1, ties)
    exact_weights = scores.double().softmax(-1)
    true = exact_weights @ values.double()
    top = scores.amax(-1, keepdim=True)
    # the weights are no longer 1, so they are rounded both ways
    if how == 'larger': top = 2*top
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if how == 'fp32': got = bf16(weights) @ values/total
    elif how == 'chance':
        def by_chance(x): return quantize(x, 'bf16', rounding='stochastic', generator=g)
        got = by_chance(by_chance(bf16(weights) @ values)/total)
    elif how == 'once': got = bf16(bf16(weights) @ values/total)
    elif how == 'fp16': got = fp16(fp16(fp16(weights) @ values)/total)
    else: got = bf16(bf16(bf16(weights) @ values)/total)
    error = (got.double() - true)/true.abs()
    rms = error.square().mean().sqrt()
    return dict(rms=rms.item(), mean=error.mean().item(),
                left=(error.mean(0).square().mean().sqrt()/rms).item())


def shared(number, cast, keys, queries=20_000):
    "The share of queries whose largest score occurs twice"
    g = torch.Generator().manual_seed(seed(number))
    scores = cast(2*torch.randn(queries, keys, generator=g))
    return dict(twice=((scores == scores.amax(-1, keepdim=True)).sum(-1) > 1).float().mean().item())


def choice(number, score, cast=bf16, given=bf16, tokens=4096, experts=256, top=8):
    "The shares of tokens with another expert than in FP32, of token-expert pairs that go elsewhere, and of tokens where a tie decides"
    g = torch.Generator().manual_seed(seed(number))
    z = torch.randn(tokens, experts, generator=g)*1.5
    kinds = dict(softmax=lambda z: z.softmax(-1), sigmoid=torch.sigmoid, logits=exact)
    right = kinds[score](z).topk(top).indices
    scores = given(kinds[score](cast(z)))
    best = scores.topk(top)
    same = (best.indices[:, :, None] == right[:, None]).any(-1)
    tie = (scores >= best.values[:, -1:]).sum(-1) > top
    return dict(other=1 - same.all(-1).float().mean().item(),
                elsewhere=1 - same.float().mean().item(), ties=tie.float().mean().item())


def counts(number, cast, less=0, spread=3, ranks=64, experts=256):
    "The share of experts whose bias moves the wrong way, or stands still, and how many different sums there are"
    g = torch.Generator().manual_seed(seed(number))
    noise = torch.randint(-32, 33, (ranks, experts), generator=g).float()
    per_rank = 640 + noise + spread*torch.randn(experts, generator=g).round()
    total = torch.zeros(experts)
    for c in per_rank: total = cast(total + c - less)
    true = per_rank.sum(0)
    true_way, way = (true - true.mean()).sign(), (total - cast(total.mean())).sign()
    wrong, still = (way*true_way < 0).float().mean(), ((way == 0) & (true_way != 0)).float().mean()
    return dict(wrong=wrong.item(), still=still.item(), distinct=len(total.unique()))


def balance(number, cast=exact, rate=1e-3, experts=32, top=4, width=16, tokens=512, steps=3000):
    "Tokens of the busiest expert over the mean of the last hundred steps, and the largest bias"
    g = torch.Generator().manual_seed(seed(number))
    router = torch.randn(experts, width, generator=g)*width**-.5
    skew = torch.randn(experts, generator=g)*4
    bias, tail = torch.zeros(experts), torch.zeros(experts)
    for step in range(steps):
        z = (torch.randn(tokens, width, generator=g) @ router.T + skew).sigmoid()
        load = torch.bincount((z + bias).topk(top).indices.flatten(), minlength=experts).float()
        bias = bias + rate*(load.mean() - load).sign()
        if cast == 'chance': bias = quantize(bias, 'bf16', rounding='stochastic', generator=g)
        else: bias = cast(bias)
        if step >= steps - 100: tail += load
    return dict(busiest=(tail.max()/tail.mean()).item(), largest=bias.max().item())


def run(row, seed):
    "The numbers of its kind"
    kind, kw = ROWS[row]
    kinds = dict(positions=positions, ties=ties, shared=shared, choice=choice, counts=counts,
                 balance=balance)
    return kinds[kind](seed, **kw)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
