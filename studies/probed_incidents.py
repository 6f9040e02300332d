"""Does one probe name the cause? The incidents of Part V as a user would have them, casts and all
(sheet 98)

A row is an incident; `found` is 1 where the sentence on top of the report names the right kind of
fault in the right module, `kind` 1 where at least the kind is right, and `faults` the number of
rows where an error begins. Adam's v, averages and sums over steps are not here: the probe sees one
batch and one update. For the variance both its large mean and the difference count as right.
"""
import math

import torch
import torch.nn.functional as F
from torch import nn

from mpcourse.sanitizer import probe_precision
from mpcourse.toys import batches, char_text, char_transformer, cross_entropy, digits, fit, plain_step, seeded


def text(number): return next(batches(char_text(), 16, 1, number))


class Normed(nn.Module):
    "Norms whose weights start at 1, and a linear layer"
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 256), nn.LayerNorm(256), nn.Linear(256, 10)
    def forward(self, x): return self.last(self.norm(self.first(x.flatten(1))).relu())


class Rotary(nn.Module):
    "One layer of attention from place 4,096"
    def __init__(self):
        super().__init__()
        self.symbol, self.qkv, self.out = nn.Embedding(32, 64), nn.Linear(64, 192), nn.Linear(64, 32)
    def turned(self, x):
        places = torch.arange(4096, 4160).to(torch.bfloat16)
        angles = (places[:, None]/10000**(torch.arange(0, 64, 2)/64)).float()
        a, b = x.chunk(2, -1)
        return torch.cat([a*angles.cos() - b*angles.sin(), a*angles.sin() + b*angles.cos()], -1)
    def forward(self, x):
        q, k, v = self.qkv(self.symbol(x)).chunk(3, -1)
        future = torch.ones(64, 64, dtype=torch.bool).triu(1)
        scores = self.turned(q) @ self.turned(k).mT/8
        return self.out(scores.masked_fill(future, -math.inf).softmax(-1) @ v)


class OnePass(nn.Module):
    "A normalization by mean(x²) − mean(x)² in BF16"
    def forward(self, x):
        x = x.bfloat16()
        mean = x.mean(-1, keepdim=True)
        variance = (x*x).mean(-1, keepdim=True) - mean*mean
        return ((x - mean)*(variance.clamp(min=0) + 1e-5).rsqrt()).float()


class Padded(nn.Module):
    "Attention in FP16 with −10⁹ for masked keys"
    def __init__(self, old):
        super().__init__()
        self.heads, self.qkv, self.out = old.heads, old.qkv, old.out
    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d//self.heads).permute(2, 0, 3, 1, 4)
        hidden = torch.ones(t, t, dtype=torch.bool).triu(1)
        hidden[:, :8] = True                                            # padding on the left
        scores = (q @ k.mT*(d//self.heads)**-.5).half()
        scores = scores + torch.where(hidden, torch.tensor(-1e9).half(), torch.tensor(0.).half())
        return self.out((scores.float().softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))


class Leaky(nn.Module):
    "A state that moves by a thousandth of what comes"
    def __init__(self):
        super().__init__()
        self.enter, self.out = nn.Linear(4, 32), nn.Linear(32, 1)
    def forward(self, x):
        h = torch.ones(len(x), 32).bfloat16()
        for i in range(64): h = h + (self.enter(x[:, i])/512).bfloat16()
        return self.out(h.float())


def norms(number):
    with seeded(number): net = Normed()
    return net, next(batches(digits(), 64, 1, number)), F.cross_entropy, dict(scheme='bf16 weights', opt=torch.optim.Adam(net.parameters(), 1e-3))

def logits(number):
    net = char_transformer(seed=number)
    nn.init.constant_(net.head.bias, 700.)
    return net, text(number), cross_entropy, dict(scheme='bf16')

def positions(number):
    with seeded(number): net, x = Rotary(), torch.randint(32, (32, 64))
    return net, (x, x), lambda out, x: cross_entropy(out[:, 3:], x[:, :-3]), dict(scheme='bf16')

def variance(number):
    with seeded(number):
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), OnePass(), nn.ReLU(),
                            nn.Linear(64, 10))
    nn.init.constant_(net[1].bias, 8.)
    return net, next(batches(digits(), 64, 1, number)), F.cross_entropy, dict(scheme='bf16')

def mask(number):
    net = char_transformer(seed=number)
    for block in net.blocks: block.attn = Padded(block.attn)
    return net, text(number), cross_entropy, dict(scheme='fp16')

def growing(number):
    net = char_transformer(seed=number)
    opt = torch.optim.AdamW(net.parameters(), .1, betas=(.9, .95), weight_decay=0.)
    fit(net, batches(char_text(), 16, 250, number), opt, cross_entropy, plain_step)
    return net, text(number), cross_entropy, dict(scheme='fp16')

def leaky(number):
    with seeded(number): net, x = Leaky(), torch.randn(32, 64, 4)
    return net, (x, x.sum((1, 2))[:, None]), F.mse_loss, dict(scheme='bf16')


INCIDENTS = { # row -> (what to probe, right kinds, a part of the right module's name)
    'norm weights in BF16': (norms, ('swallowed updates',), 'norm'), 'logits with an offset': (logits, ('a large offset',), 'head'),
    'positions in BF16': (positions, ('lost values',), ''), 'variance in one pass': (variance, ('cancellation', 'a large offset'), '2'),
    'mask of -1e9 in FP16': (mask, ('overflow',), 'attn'), 'scores that have grown': (growing, ('overflow',), 'attn'),
    'state in BF16': (leaky, ('stands still',), '')}
ROWS, SEEDS = list(INCIDENTS), range(10)


def run(row, seed):
    "Probe one incident"
    make, kinds, name = INCIDENTS[row]
    net, batch, loss_func, how = make(seed)
    report = probe_precision(net, batch, loss_func, **how)
    kind = report.worst is not None and report.worst.kind in kinds
    found = kind and name in report.worst.module + report.worst.name
    return dict(found=found, kind=kind, faults=len(report.findings))


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
