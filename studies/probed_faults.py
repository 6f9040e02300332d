"""How often is the probe right? Ten faults, and sixteen runs without one (chapter 18)

A row is one batch of a model. `found` is 1 where the worst fault of the report has the right kind
and the right place, `accused` 1 where the report names any fault; sound rows are in formats in
which these nets learn as in FP32. `warns`: does `early_warning` of chapter 17 see the fault? Two
rows train the integrator, since a loss may show a fault, too.
"""
import pandas as pd, torch, torch.nn.functional as F
from torch import nn

from mpcourse.failures import textbook_cross_entropy
from mpcourse.fp8 import RECIPES
from mpcourse.overflow import early_warning
from mpcourse.probe import probe_precision
from mpcourse.toys import batches, fit, get_toy, plain_step
from mpcourse.underflow import probe_flushed


class Leaky(nn.Module):
    "The integrator of the chapter: a state that moves by a thousandth of its input"
    def __init__(self, dtype=torch.bfloat16, d=16):
        super().__init__()
        self.inp = nn.Linear(2, d)
        self.out = nn.Sequential(nn.Linear(d, 32), nn.Tanh(), nn.Linear(32, 1))
        self.rate = nn.Parameter(-torch.linspace(6.4, 7.8, d))
        self.start, self.dtype = nn.Parameter(torch.ones(d)), dtype

    def forward(self, x):
        u, k = self.inp(x), self.rate.exp()
        h = self.start.expand(len(x), -1).to(self.dtype)
        for t in range(x.shape[1]):
            h = (h + k*(u[:, t] - h)).to(self.dtype)
        return self.out((h.float() - self.start)*8)[:, 0]


class Norm(nn.Module):
    "A normalization by E[x²] − E[x]²"
    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        square = (x*x).mean(-1, keepdim=True)
        var = square - mean*mean
        return (x - mean)*(var + 1e-5).rsqrt()


def rotated(x, start, dtype):
    "Rotary positions from `start` on, with angles in `dtype`"
    pos = torch.arange(x.shape[1]) + start
    freq = 1e4**(-torch.arange(0, x.shape[2], 2)/x.shape[2])
    angle = pos.to(dtype)[:, None]*freq
    a, b = x[..., ::2], x[..., 1::2]
    return torch.cat([a*angle.cos() - b*angle.sin(), a*angle.sin() + b*angle.cos()], -1)


class Rotary(nn.Module):
    "Attention with rotary positions"
    def __init__(self, start, dtype=torch.bfloat16, d=32):
        super().__init__()
        self.emb, self.qkv, self.head = nn.Embedding(32, d), nn.Linear(d, 3*d), nn.Linear(d, 32)
        self.at = start, dtype

    def forward(self, x):
        h = self.emb(x)
        q, k, v = self.qkv(h).chunk(3, -1)
        scores = rotated(q, *self.at)@rotated(k, *self.at).transpose(1, 2)/6
        return self.head(h + scores.softmax(-1)@v)


def begun(name, number, steps=30):
    "A toy's model after some steps in FP32, the next batch, and the loss"
    toy = get_toy(name)
    model, (*old, batch) = toy.model(number), batches(toy.data(), toy.bs, steps + 1, number)
    fit(model, old, toy.opt(model.parameters()), toy.loss_func, plain_step)
    return model, batch, toy.loss_func


def own_loss(number):
    "A loss in FP16 that does not subtract the largest logit"
    model, batch, _ = begun('relu_mlp', number, 100)
    def loss_func(pred, y): return textbook_cross_entropy((pred*10).half(), y).float()
    return model, batch, loss_func, 'fp16'


def small_updates(number):
    "Weights in BF16 and a learning rate of 1e-5"
    model, batch, loss_func = begun('relu_mlp', number, 100)
    return model, batch, loss_func, 'bf16 weights', 1., torch.optim.Adam(model.parameters(), 1e-5)


def drifted(number):
    "The GPT with logits at 700"
    toy = get_toy('char_lm')
    model = toy.model(number)
    nn.init.constant_(model.head.bias, 700.)
    return model, next(batches(toy.data(), 16, 1, number)), toy.loss_func


def signals(start):
    "Sixteen noisy signals, and twice their means"
    g = torch.Generator().manual_seed(start)
    mean = torch.rand(16, 1, 1, generator=g)*2 - 1
    noise = .1*torch.randn(16, 256, 1, generator=g)
    return torch.cat([mean/2 + noise, torch.ones(16, 256, 1)], 2), mean[:, 0, 0]


def integrator(number, dtype=torch.bfloat16):
    "One batch of signals"
    return Leaky(dtype), signals(number), F.mse_loss, None


def losses(number, dtype):
    "Losses of the integrator: the means of the last twenty of sixty steps, and of ten earlier ones"
    net, data = Leaky(dtype), [signals(1000*number + i) for i in range(60)]
    loss = fit(net, data, torch.optim.Adam(net.parameters(), lr=1e-2), F.mse_loss, plain_step)['loss']
    return dict(last=sum(loss[-20:])/20, early=sum(loss[10:20])/10)


def copied_token(pred, y): return F.cross_entropy(pred[:, 1:].flatten(0, 1), y[:, :-1].flatten())


def positions(number, start, dtype=torch.bfloat16):
    "Copy the token before"
    tokens = torch.randint(32, (8, 32))
    return Rotary(start, dtype), (tokens, tokens), copied_token, None


def normed(number):
    "Inputs of the norm with a mean of 8"
    net = nn.Sequential(nn.Linear(64, 64), Norm(), nn.Linear(64, 10))
    nn.init.constant_(net[0].bias, 8.)
    return net, (torch.randn(32, 64), torch.randint(10, (32,))), F.cross_entropy, 'bf16 weights'


FAULTS = { # row -> (its kind, a part of its line or module's name, what to probe)
    'underflow': ('underflow', '', lambda n: (*begun('deep_sigmoid', n, 1), 'fp16')),
    'overflow in a loss': ('overflow', 'pred.exp()', own_loss),
    'overflow by a loss scale': ('overflow', '', lambda n: (*begun('relu_mlp', n, 100), 'fp16', 2.**24)),
    'swallowed updates': ('swallowed updates', 'weight', small_updates),
    'a product in few bits': ('a product in few bits', '',
                              lambda n: (*begun('two_towers', n), RECIPES['tensorwise'])),
    'a large offset': ('a large offset', 'head', drifted),
    'a state that stands still': ('a state that stands still', 'k*(u[:, t] - h)', integrator),
    'lost values in BF16': ('lost values', 'pos.to(dtype)', lambda n: positions(n, 4096)),
    'lost values in FP16': ('lost values', 'pos.to(dtype)', lambda n: positions(n, 8192, torch.float16)),
    'cancellation': ('cancellation', 'square - mean*mean', normed)}
SCHEMES = {'BF16': ('bf16',), 'FP16': ('fp16', 2.**14), 'FP8': (RECIPES['tensorwise'],)}
SOUND = [f'sound: {name}, {scheme}' for name in ('char_lm', 'relu_mlp', 'cnn', 'deep_sigmoid', 'two_towers')
         for scheme in SCHEMES if (name, scheme) != ('two_towers', 'FP8')]
TRAINED = {'losses: integrator in FP32': torch.float32, 'losses: integrator in BF16': torch.bfloat16}
ROWS = [*FAULTS, *SOUND, 'sound: positions from 0', 'sound: integrator in FP32', *TRAINED]
SEEDS = range(10)


def healthy(row, number):
    "The arguments of the probe for a sound row"
    name, _, scheme = row.removeprefix('sound: ').partition(', ')
    if scheme: return *begun(name, number), *SCHEMES[scheme]
    return positions(number, 0) if name == 'positions from 0' else integrator(number, torch.float32)


def warned(model, batch, loss_func, scheme='bf16', scale=1., opt=None):
    "Does `early_warning` warn after three equal collections of this batch?"
    dtype = 'fp16' if scheme == 'fp16' else 'bf16'
    found = probe_flushed(model, batch, loss_func, dtype, scale)
    rows = [dict(step=i, name=n, kind=k, flushed=z.share.item())
            for i in range(3) for (n, k), z in found.items()]
    return early_warning(pd.DataFrame(rows)).warns


def run(row, seed):
    "Probe one batch; or train the integrator, whose loss is the alternative to a probe"
    torch.manual_seed(seed)
    if row in TRAINED: return losses(seed, TRAINED[row])
    if row not in FAULTS: return dict(accused=bool(probe_precision(*healthy(row, seed)).faults))
    kind, place, make = FAULTS[row]
    case = make(seed)
    worst = probe_precision(*case).worst
    found = worst is not None and worst.kind == kind and place in worst.code + worst.name
    return dict(found=found, accused=worst is not None, warns=warned(*case))


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
