"""Which errors of one operation does no training of this size feel? What we could not break
(chapter 32)

`muon`: Newton–Schulz in a format, in one call and in the training of the course's GPT. `norms`:
its norm weights in MXFP8. `four_six`: its products in NVFP4 with one scale a block, or the better
of two. `swiglu`: E4M3 with delayed scales behind a SwiGLU whose two halves are aligned. `steps`: a
diffusion net that is told its time step in a format. `sum`: the gradients of many micro-batches
added up in BF16.
"""
import math

import torch
import torch.nn.functional as F
from torch import nn

from mpcourse.fourbits import nvfp4_scale
from mpcourse.formats import get_format
from mpcourse.fp8 import RECIPES
from mpcourse.rounding import quantize
from mpcourse.toys import batches, char_text, char_transformer, cross_entropy, digits, mlp, seed, seeded

def exact(x): return x.clone()
def bf16(x): return x.bfloat16().float()
def fp16(x): return x.half().float()

CASTS = {'FP32': exact, 'BF16': bf16, 'FP16': fp16}
MUON = {name: dict(cast=cast) for name, cast in CASTS.items()}
NORMS = {'FP32': {}, 'MXFP8': dict(recipe='mx_floor'), 'MXFP8, scale rounded up': dict(recipe='mx')}
FOUR_SIX = {'FP32': {}, 'NVFP4': dict(tops=(6.,)),
            'NVFP4, the better of two scales': dict(tops=(6., 4.))}
SWIGLU = {'FP32': {}, 'E4M3, delayed scale': dict(delayed=True)}
STEPS = {'FP32': dict(cast=exact), 'BF16': dict(cast=bf16), 'always 0': dict(cast=torch.zeros_like)}
SUM = {f'{n:,} in BF16': dict(n=n) for n in (256, 1024, 4096)} | {'1,024 in FP32': dict(n=1024, cast=exact), '4,096 in FP32': dict(n=4096, cast=exact),
                                                              '1,024 in BF16, by pairs': dict(n=1024, pairs=True),
        '4,096 in BF16, true length': dict(n=4096, rescaled=True), '4,096 in FP32, .86 of the rate': dict(n=4096, cast=exact, rate=.43),
        '4,096 in BF16, true length, 1.17 of the rate': dict(n=4096, rescaled=True, rate=.583),
        '4,096 in BF16, 60 steps': dict(n=4096, train_steps=60), '4,096 in FP32, 60 steps': dict(n=4096, cast=exact, train_steps=60)}
KINDS = dict(muon=MUON, norms=NORMS, four_six=FOUR_SIX, swiglu=SWIGLU, steps=STEPS, sum=SUM)
ROWS = {f'{kind}: {name}': (kind, kw) for kind, rows in KINDS.items() for name, kw in rows.items()}
SEEDS = range(10)


class Cast(torch.autograd.Function):
    "A cast with a straight-through gradient"
    @staticmethod
    def forward(ctx, x, cast): return cast(x)
    @staticmethod
    def backward(ctx, g): return g, None


def gpt_loss(net, number, steps, make_opt=None, after=None):
    "Train, and give the loss on new text"
    opt = make_opt(net) if make_opt else torch.optim.Adam(net.parameters(), 3e-3)
    for x, y in batches(char_text(), 16, steps, number):
        net.zero_grad()
        cross_entropy(net(x), y).backward()
        opt.step()
        if after: after()
    x, y = char_text().valid
    with torch.no_grad(): return cross_entropy(net(x[:64]), y[:64]).item()


# --- Muon ---

# Polar Express, arXiv 2505.16932
COEFFICIENTS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462), (4.042929935166739, -2.808917465908714, .5000178451051316),
    (3.8916678022926607, -2.772484153217685, .5060648178503393), (3.285753657755655, -2.3681294933425376, .46449024233003106),
    (2.3465413258596377, -1.7097828382687081, .42323551369305323))

def newton_schulz(g, cast):
    "Every singular value near 1"
    x = g.mT if g.shape[0] > g.shape[1] else g
    x = cast(x/(x.norm()*1.01 + 1e-12))
    for a, b, c in COEFFICIENTS:
        s = cast(x @ x.mT)
        x = cast(a*x + cast(cast(b*s + c*cast(s @ s)) @ x))
    return x.mT if g.shape[0] > g.shape[1] else x


def muon(number, cast):
    "Relative error of one call on a matrix of condition 10⁵, and the loss of a training"
    g = torch.Generator().manual_seed(seed(number))
    left = torch.linalg.qr(torch.randn(64, 64, generator=g))[0]
    right = torch.linalg.qr(torch.randn(128, 64, generator=g))[0]
    m = left @ torch.diag(torch.logspace(0, -5, 64)) @ right.mT
    true = newton_schulz(m.double(), exact)
    error = (newton_schulz(m, cast).double() - true).norm()/true.norm()
    net = char_transformer(seed=number)
    mats = [p for p in net.blocks.parameters() if p.ndim == 2]
    momenta = [torch.zeros_like(p) for p in mats]
    inside = {id(p) for p in mats}
    def others(net):
        return torch.optim.Adam([p for p in net.parameters() if id(p) not in inside], 3e-3)
    @torch.no_grad()
    def step():
        for p, v in zip(mats, momenta):
            v.mul_(.95).add_(p.grad)
            p -= .02*newton_schulz(p.grad + .95*v, cast)*max(1, p.shape[0]/p.shape[1])**.5
    return dict(error=error.item(), loss=gpt_loss(net, number, 120, others, step))


# --- norm weights, four bits, SwiGLU ---

def norms(number, recipe=None):
    "Different norm weights of 64 after the cast, their mean over the true one, and the loss"
    net, g = char_transformer(seed=number), torch.Generator().manual_seed(seed(number))
    cast = (lambda w: RECIPES[recipe].w(w[None])[0]) if recipe else exact
    layers = [m for m in net.modules() if isinstance(m, nn.LayerNorm)]
    kept, mean = [], []
    for m in layers:
        with torch.no_grad(): m.weight.copy_(.9 + .09*torch.rand(64, generator=g))
        stored = cast(m.weight.detach())
        kept.append(len(stored.unique()))
        mean.append((stored.mean()/m.weight.mean()).item())
        m.forward = lambda x, m=m: F.layer_norm(x, (64,), Cast.apply(m.weight, cast), m.bias)
    return dict(kept=sum(kept)/len(kept), mean=sum(mean)/len(mean), loss=gpt_loss(net, number, 120))


def four_bits(x, tops):
    "NVFP4 in blocks of 16; with several `tops` the block's largest number becomes the one that errs least"
    blocks = x.unflatten(-1, (-1, 16))
    amax = blocks.abs().amax(-1, keepdim=True)
    tries = []
    for top in tops:
        scale = nvfp4_scale(amax*6/top, amax.max()*6/min(tops), get_format('e2m1'))
        tries.append(quantize(blocks/scale, 'e2m1')*scale)
    errors = torch.stack([(t - blocks).square().sum(-1, keepdim=True) for t in tries])
    best = torch.stack(tries).gather(0, errors.argmin(0, keepdim=True).expand(1, *blocks.shape))[0]
    return best.flatten(-2)


def four_six(number, tops=None):
    "Squared error of normal numbers, in per cent, and the loss"
    net, g = char_transformer(seed=number), torch.Generator().manual_seed(seed(number))
    def cast(x): return four_bits(x, tops) if tops else exact(x)
    x = torch.randn(512, 1024, generator=g)
    error = (cast(x) - x).square().sum()/x.square().sum()*100
    for m in net.blocks.modules():
        if isinstance(m, nn.Linear):
            m.forward = lambda x, m=m: F.linear(Cast.apply(x, cast), Cast.apply(m.weight, cast),
                m.bias)
    return dict(error=error.item(), loss=gpt_loss(net, number, 60))


class Swiglu(nn.Module):
    "The feed-forward part, with the product of both halves in a format"
    def __init__(self, direction, cast, width=64, hidden=128):
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down, self.cast = nn.Linear(hidden, width, bias=False), cast
        with torch.no_grad():
            # aligned: their product is a square
            self.gate.weight[0] = self.up.weight[0] = 2*direction
            self.down.weight[:, 0] *= .05

    def forward(self, x): return self.down(Cast.apply(F.silu(self.gate(x))*self.up(x), self.cast))


class Delayed:
    "E4M3; the scale is the largest number of the last sixteen batches"
    def __init__(self): self.history, self.worst = [], 0.

    def __call__(self, x):
        amax = x.abs().max().item()
        expected = max(self.history[-16:], default=amax)
        self.worst = max(self.worst, amax/expected)
        self.history.append(amax)
        return quantize(x*448/expected, 'e4m3')*expected/448


def swiglu(number, delayed=False, steps=120):
    "The loss, and the largest number over the largest that the history expects"
    net = char_transformer(seed=number)
    with seeded(number):
        direction = F.normalize(torch.randn(64), dim=0)
        casts = [Delayed() if delayed else exact for _ in net.blocks]
        for block, cast in zip(net.blocks, casts): block.ffn = Swiglu(direction, cast)
    # capitals, which are rare, point along it
    with torch.no_grad(): net.tok.weight[33:59] += 8*direction
    loss = gpt_loss(net, number, steps)
    return dict(loss=loss, worst=max(c.worst for c in casts) if delayed else 1.)


# --- time steps ---

ANGLE = torch.arange(8)*math.pi/4
CENTRES = 2*torch.stack([ANGLE.cos(), ANGLE.sin()], 1)
KEPT = (1 - torch.linspace(1e-4, .02, 1000)).cumprod(0)

def told(t):
    "A time step as 64 sines and cosines"
    angles = t[:, None]*torch.exp(-math.log(10_000)*torch.arange(32)/32)
    return torch.cat([angles.cos(), angles.sin()], 1)


def steps(number, cast, train_steps=2000):
    "Different time steps of 1,000, the samples' distance from the nearest of eight centres, and how unevenly they choose one"
    g = torch.Generator().manual_seed(seed(number))
    net = mlp([66, 128, 128, 128, 2], seed=number)
    opt = torch.optim.Adam(net.parameters(), 2e-3)
    for i in range(train_steps):
        x = CENTRES[torch.randint(8, (256,), generator=g)] + .05*torch.randn(256, 2, generator=g)
        t, noise = torch.randint(1000, (256,), generator=g), torch.randn(256, 2, generator=g)
        a = KEPT[t][:, None]
        got = net(torch.cat([a.sqrt()*x + (1 - a).sqrt()*noise, told(t.float())], 1))
        opt.param_groups[0]['lr'] = 2e-3*(1 - i/train_steps)
        opt.zero_grad()
        (got - noise).square().mean().backward()
        opt.step()
    x = torch.randn(1000, 2, generator=g)
    with torch.no_grad():
        for t in range(999, -1, -1):
            a, before = KEPT[t], KEPT[t - 1] if t else torch.ones(())
            noise = net(torch.cat([x, told(cast(torch.full((1000,), float(t))))], 1))
            x = before.sqrt()*(x - (1 - a).sqrt()*noise)/a.sqrt() + (1 - before).sqrt()*noise
    near, which = torch.cdist(x, CENTRES).min(1)
    shares = torch.bincount(which, minlength=8)/len(x)
    return dict(different=len(cast(torch.arange(1000).float()).unique()),
                distance=near.square().mean().sqrt().item(),
                uneven=(shares - 1/8).abs().max().item())


# --- sums of micro-batches ---

def added(gradients, cast, pairs):
    "The sum over the first axis, rounded after each addition"
    if pairs:
        while len(gradients) > 1: gradients = cast(gradients[::2] + gradients[1::2])
        return gradients[0]
    total = torch.zeros_like(gradients[0])
    for g in gradients: total = cast(total + g)
    return total


def sum_(number, n, cast=bf16, pairs=False, rescaled=False, rate=.5, train_steps=20):
    "Cosine of the sum with the true one, its length over the true one's, means over the steps; loss and accuracy on new digits"
    net, data = mlp([64, 32, 10], seed=number), digits()
    names = [name for name, _ in net.named_parameters()]
    def loss(ps, x, y):
        return F.cross_entropy(torch.func.functional_call(net, ps, (x[None],)), y[None])
    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))
    g = torch.Generator().manual_seed(seed(number))
    cosines, lengths = [], []
    for _ in range(train_steps):
        i = torch.randint(len(data.train[0]), (n,), generator=g)
        grads = each({k: p.detach() for k, p in net.named_parameters()}, data.train[0][i],
                     data.train[1][i])
        true = torch.cat([grads[k].sum(0).flatten() for k in names])
        got = added(torch.cat([grads[k].flatten(1) for k in names], 1), cast, pairs)
        cosines.append(F.cosine_similarity(true, got, dim=0).item())
        lengths.append((got.norm()/true.norm()).item())
        if rescaled: got = got*true.norm()/got.norm()
        with torch.no_grad():
            flat = torch.nn.utils.parameters_to_vector(net.parameters()) - rate*got/n
            torch.nn.utils.vector_to_parameters(flat, net.parameters())
    x, y = data.valid
    with torch.no_grad(): out = net(x)
    return dict(cosine=sum(cosines)/len(cosines), length=sum(lengths)/len(lengths),
                loss=F.cross_entropy(out, y).item(),
                accuracy=(out.argmax(-1) == y).float().mean().item())


def run(row, seed):
    "The numbers of its kind"
    kind, kw = ROWS[row]
    kinds = dict(muon=muon, norms=norms, four_six=four_six, swiglu=swiglu, steps=steps, sum=sum_)
    return kinds[kind](seed, **kw)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
