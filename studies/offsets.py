"""What does softmax not see, and which formats pay for it? (chapter 30)

`logits`: the course's GPT, whose head adds one constant to all logits, 120 steps. `keys`: one
attention layer that says what stood three places before, trained in FP32; then one vector is added
to all its keys, and keys or scores are stored in a format. `variance`: digits, a normalization
that computes the mean of x² minus the mean squared. `mask`: the GPT with padding on the left and
large negative numbers in the masked scores. `scores`: the GPT at a rate of .1, where the scores
grow. Everything else computes in FP32.
"""
import math

import torch
import torch.nn.functional as F
from torch import nn

from mpcourse.rounding import quantize
from mpcourse.toys import batches, char_text, char_transformer, cross_entropy, digits, seed, seeded

def exact(x): return x
def bf16(x): return x.bfloat16().float()      # the gradient is rounded, too
def fp16(x): return x.half().float()

LOGITS = {
    'FP32': {}, 'FP32, no offset': dict(offset=0.), 'BF16 logits': dict(logits=bf16), 'BF16 logits, no offset': dict(logits=bf16, offset=0.),
    'BF16 hidden states': dict(hidden=bf16), 'BF16 hidden states and head': dict(hidden=bf16, head=bf16), 'FP16 logits': dict(logits=fp16), 'BF16 logits, offset 90': dict(logits=bf16, offset=90.),
    'BF16 logits, offset 200': dict(logits=bf16, offset=200.), 'BF16 logits, offset 350': dict(logits=bf16, offset=350.),
    'FP32, 480 steps': dict(steps=480), 'BF16 logits, 480 steps': dict(logits=bf16, steps=480),
    'BF16 logits, mean taken out before': dict(logits=bf16, centre='before'),
    'BF16 logits, mean taken out after': dict(logits=bf16, centre='after'),
    'BF16 logits, read in FP32': dict(logits=bf16, read=exact),
    'BF16 logits, offset 200, read in FP32': dict(logits=bf16, offset=200., read=exact),
    'BF16 logits, offset 350, read in FP32': dict(logits=bf16, offset=350., read=exact),
    'BF16 logits, z-loss': dict(logits=bf16, z=1e-4), 'FP32, z-loss': dict(z=1e-4)}
KEYS = {f'{size}': dict(size=float(size)) for size in (0, 100, 600, 3000, 30000)}
VARIANCE = {
    'FP32': {}, 'BF16 statistics': dict(cast=bf16), 'BF16 input': dict(enter=bf16), 'BF16 statistics, mean 1': dict(cast=bf16, mean=1.),
    'BF16 statistics, two passes': dict(cast=bf16, how='two passes'), 'BF16 statistics, shifted': dict(cast=bf16, how='shifted'),
    'BF16 statistics, clamped at 0': dict(cast=bf16, how='clamped'), 'BF16 statistics, epsilon .1': dict(cast=bf16, eps=.1),
    'FP32, mean 2000': dict(mean=2000.), 'FP32, mean 2000, two passes': dict(mean=2000., how='two passes'),
    'BF16 statistics, mean 700, two passes': dict(cast=bf16, how='two passes', mean=700.),
    'BF16 statistics, mean 700, subtracted before': dict(cast=bf16, how='two passes', mean=700., before=True)}
MASK = {
    'FP32, -1e9': {}, 'FP16 scores, -1e9': dict(scores=torch.float16), 'FP16 but for the scores, -1e9': dict(rest=fp16),
    'FP32, -inf': dict(value=-math.inf), 'FP16 scores, -1e4': dict(scores=torch.float16, value=-1e4),
    'FP16 scores, one mask': dict(scores=torch.float16, value=None), 'BF16 scores, -1e9': dict(scores=torch.bfloat16),
    'FP16 scores, -1e9, padding on the right': dict(scores=torch.float16, left=False)}
SCORES = {
    'FP32': {}, 'FP16 scores': dict(scores=fp16), 'BF16 scores': dict(scores=bf16), 'FP16 queries, keys and values': dict(rest=fp16),
    'FP16 scores, QK-norm': dict(scores=fp16, norm=True), 'FP32, QK-norm': dict(norm=True), 'FP16 scores, cap 50': dict(scores=fp16, cap=50.),
    'FP16 scores, QK-clip 100': dict(scores=fp16, clip=100.), 'FP16 scores, rate .03': dict(scores=fp16, lr=.03), 'FP32, rate .03': dict(lr=.03),
    'FP32, rate .003': dict(lr=.003), 'FP32, cap 50': dict(cap=50.), 'FP32, QK-clip 100': dict(clip=100.),
    'FP32, rate .03, QK-norm': dict(lr=.03, norm=True), 'FP16 scores, rate .01': dict(scores=fp16, lr=.01), 'FP32, rate .01': dict(lr=.01)}
KINDS = dict(logits=LOGITS, keys=KEYS, variance=VARIANCE, mask=MASK, scores=SCORES)
ROWS = {f'{kind}: {name}': (kind, kw) for kind, rows in KINDS.items() for name, kw in rows.items()}
SEEDS = range(10)


def logits(number, logits=exact, hidden=exact, head=exact, offset=700., centre=None, z=0.,
           steps=120, read=None):
    "Loss on new text, and the mean of the head's bias at the end"
    net = char_transformer(seed=number)
    nn.init.constant_(net.head.bias, offset)
    inside = {}
    net.ln.register_forward_hook(lambda m, args, out: inside.update(hidden=out))
    def predicted(x):
        net(x)
        w, b, h = head(net.head.weight), head(net.head.bias), hidden(inside['hidden'])
        if centre == 'before': return logits(F.linear(h, w - w.mean(0), b - b.mean()))
        out = logits(F.linear(h, w, b))
        if centre == 'after': out = out - out.mean(-1, keepdim=True)
        return out
    opt = torch.optim.AdamW(net.parameters(), 3e-3, weight_decay=.01)
    for x, y in batches(char_text(), 16, steps, number):
        out = predicted(x)
        loss = cross_entropy(out, y)
        if z: loss = loss + z*out.logsumexp(-1).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    logits = read or logits             # of the loss on new text
    x, y = char_text().valid
    with torch.no_grad():
        return dict(loss=cross_entropy(predicted(x[:64]), y[:64]).item(),
                    offset=net.head.bias.mean().item())


# --- one layer of attention that copies ---

LENGTH, WIDTH, SYMBOLS, BACK = 64, 64, 32, 3
FUTURE = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)

class Copy(nn.Module):
    "Says which symbol stood three places before"
    def __init__(self):
        super().__init__()
        self.symbol, self.place = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3*WIDTH), nn.Linear(WIDTH, SYMBOLS)

    def forward(self, x, shift=0., keys=exact, scores=exact):
        q, k, v = self.qkv(self.symbol(x) + self.place.weight).chunk(3, -1)
        s = scores(q @ keys(k + shift).mT*WIDTH**-.5)
        return self.out(s.masked_fill(FUTURE, -math.inf).softmax(-1) @ v)


def int4(k):
    "Fifteen steps, one scale for each key"
    scale = k.abs().amax(-1, keepdim=True)/7
    return (k/scale).round()*scale

def int4_between(k, axis):
    "Sixteen steps between the least and the largest along an axis: a scale and a zero point for each key (-1) or channel (-2)"
    low, high = k.amin(axis, keepdim=True), k.amax(axis, keepdim=True)
    scale = (high - low)/15
    return ((k - low)/scale).round()*scale + low

def fp8(k):
    "E4M3, one scale for the tensor"
    scale = k.abs().max()/448
    return quantize(k/scale, 'e4m3')*scale

def smooth(fmt): return lambda k: fmt(k - k.mean(-2, keepdim=True))

READ = {
    'FP32': {}, 'BF16 keys': dict(keys=bf16), 'BF16 scores': dict(scores=bf16), 'FP16 scores': dict(scores=fp16), 'FP8 keys': dict(keys=fp8),
    'INT4 keys': dict(keys=int4), 'INT4, mean key out': dict(keys=smooth(int4)), 'INT4 by channel': dict(keys=lambda k: int4_between(k, -2)),
    'INT4, a zero point for each key': dict(keys=lambda k: int4_between(k, -1))}

def keys(number, size):
    "Accuracy of the same weights in each format, with a vector of this length added to all keys"
    g = torch.Generator().manual_seed(seed(number))
    with seeded(number): net, direction = Copy(), F.normalize(torch.randn(WIDTH), dim=0)
    opt = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(300):
        x = torch.randint(SYMBOLS, (32, LENGTH), generator=g)
        opt.zero_grad()
        F.cross_entropy(net(x)[:, BACK:].flatten(0, 1), x[:, :-BACK].flatten()).backward()
        opt.step()
    x = torch.randint(SYMBOLS, (64, LENGTH), generator=g)
    found = {}
    with torch.no_grad():
        for name, kw in READ.items():
            said = net(x, size*direction, **kw)[:, BACK:].argmax(-1)
            found[name] = (said == x[:, :-BACK]).float().mean().item()
        own = net.qkv(net.symbol(x) + net.place.weight).chunk(3, -1)[1].norm(dim=-1).mean().item()
    return {**found, 'length of a key': own}


# --- a mean in the variance ---

def normalized(x, how, cast, eps):
    "Mean 0 and variance 1 over the last dimension; every statistic is cast"
    def mean(z): return cast(z.mean(-1, keepdim=True))
    if how == 'two passes':
        m = mean(x)
        return (x - m)*(mean(cast((x - m)**2)) + eps).rsqrt()
    if how == 'shifted': x = x - x[..., :1]
    m = mean(x)
    variance = cast(mean(cast(x*x)) - cast(m*m))
    if how == 'clamped': variance = variance.clamp(min=0)
    return (x - m)*(variance + eps).rsqrt()


def variance(number, how='one pass', cast=exact, enter=exact, mean=8., eps=1e-5, before=False,
             steps=150):
    "Accuracy (0 where the loss was not finite), and the steps until then"
    with seeded(number): first, last = nn.Linear(64, 64), nn.Linear(64, 10)
    nn.init.constant_(first.bias, mean)
    opt, data = torch.optim.Adam([*first.parameters(), *last.parameters()], 1e-3), digits()
    def net(x):
        h = enter(first(x.flatten(1)))
        if before: h = h - h.mean(-1, keepdim=True)
        return last(normalized(cast(h), how, cast, eps).relu())
    for i, (x, y) in enumerate(batches(data, 64, steps, number)):
        loss = F.cross_entropy(net(x), y)
        if not loss.isfinite(): return dict(accuracy=0., steps=i)
        opt.zero_grad()
        loss.backward()
        opt.step()
    x, y = data.valid
    return dict(accuracy=(net(x).argmax(1) == y).float().mean().item(), steps=steps)


# --- attention whose scores can be changed ---

class Attention(nn.Module):
    "The GPT's attention with `change(scores, padding)` between product and softmax"
    def __init__(self, old, change, rest=exact, norm=False):
        super().__init__()
        self.heads, self.qkv, self.out = old.heads, old.qkv, old.out
        self.change, self.rest, self.norm, self.top = change, rest, norm, 0.

    def forward(self, x):
        b, t, d = x.shape
        qkv = self.rest(self.qkv(x)).view(b, t, 3, self.heads, d//self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if self.norm: q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])
        scores = q @ k.mT*(d//self.heads)**-.5
        self.top = scores.detach().abs().max().item()
        weights = self.change(scores).softmax(-1)
        return self.out((self.rest(weights) @ v).transpose(1, 2).reshape(b, t, d))


def gpt(number, change, **kw):
    "The course's GPT with such attention"
    net = char_transformer(seed=number)
    for block in net.blocks: block.attn = Attention(block.attn, change, **kw)
    return net


def mask(number, scores=torch.float32, value=-1e9, rest=exact, left=True, steps=40):
    "Mean loss of the last five steps; infinite where one was not finite"
    g = torch.Generator().manual_seed(seed(number))
    now = {}
    def masked(s):
        s, pad = s.to(scores), now['pad'][:, None, None]
        if value is None: return s.masked_fill(FUTURE | pad, torch.finfo(scores).min).float()
        large = torch.tensor(value).to(scores)
        zero = torch.zeros((), dtype=scores)
        return (s + torch.where(FUTURE, large, zero) + torch.where(pad, large, zero)).float()
    net, losses = gpt(number, masked, rest=rest), []
    opt = torch.optim.Adam(net.parameters(), 3e-3)
    for x, y in batches(char_text(), 16, steps, number):
        n = torch.randint(1, 20, (len(x), 1), generator=g)
        now['pad'] = torch.arange(64) < n if left else torch.arange(64) >= 64 - n
        loss = F.cross_entropy(net(x).transpose(1, 2), y.masked_fill(now['pad'], -100))
        losses.append(loss.item() if loss.isfinite() else math.inf)
        opt.zero_grad()
        loss.backward()
        opt.step()
    return dict(first=losses[0], loss=sum(losses[-5:])/5)


def scores(number, scores=exact, rest=exact, norm=False, cap=0., clip=0., lr=.1, steps=250):
    "Mean of the last twenty losses (infinite where one was not finite), the largest score, and the steps until then"
    def change(s):
        if cap: s = cap*torch.tanh(s/cap)
        return scores(s).masked_fill(FUTURE, -math.inf)
    net, losses, top = gpt(number, change, rest=rest, norm=norm), [], 0.
    opt = torch.optim.AdamW(net.parameters(), lr, betas=(.9, .95), weight_decay=0.)
    for i, (x, y) in enumerate(batches(char_text(), 16, steps, number)):
        loss = cross_entropy(net(x), y)
        top = max(top, *(block.attn.top for block in net.blocks))
        if not loss.isfinite(): return dict(loss=math.inf, top=top, steps=i)
        losses.append(loss.item())
        opt.zero_grad()
        loss.backward()
        opt.step()
        for block in net.blocks if clip else ():
            if block.attn.top > clip: shrink(block.attn, (clip/block.attn.top)**.5)
    return dict(loss=sum(losses[-20:])/20, top=top, steps=steps)


@torch.no_grad()
def shrink(attn, factor):
    "Queries and keys of a layer, times a factor (QK-clip)"
    width = 2*attn.qkv.in_features
    attn.qkv.weight[:width] *= factor
    attn.qkv.bias[:width] *= factor


def run(row, seed):
    "The numbers of its kind, one training"
    kind, kw = ROWS[row]
    kinds = dict(logits=logits, keys=keys, variance=variance, mask=mask, scores=scores)
    return kinds[kind](seed, **kw)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
