"""Nets with a fault of their arithmetic, for `sanitized_faults` (chapter 18)

Each function takes a seed and returns the model, and a function that makes one step. `FAULTS` has a
part of the line where the fault begins.
"""
import copy, math
from functools import partial

import torch, torch.nn.functional as F
from torch import nn

import mpcourse.zoo  # noqa: F401
from mpcourse.failures import textbook_cross_entropy
from mpcourse.fp8 import RECIPES, simulate_fp8
from mpcourse.toys import batches, fit, get_toy, plain_step, predict

BF16, FP16 = torch.bfloat16, torch.float16


def stepped(model, x, y, loss_func, dtype=None, scale=1., opt=None):
    "A step under autocast, or as the model computes"
    inputs = x if isinstance(x, tuple) else (x,)
    def step():
        with torch.autocast('cpu', dtype or BF16, enabled=dtype is not None): pred = model(*inputs)
        loss = loss_func(pred.float(), y)
        (loss*scale).backward()
        if opt is not None: opt.step()
    return model, step


def begun(name, seed, steps=30):
    "A toy's model after some steps in FP32, the next batch, and the loss"
    toy = get_toy(name)
    model, (*old, batch) = toy.model(seed), batches(toy.data(), toy.bs, steps + 1, seed)
    fit(model, old, toy.opt(model.parameters()), toy.loss_func, plain_step)
    return model, *batch, toy.loss_func


def underflow(seed): return stepped(*begun('deep_sigmoid', seed, 1), FP16)


def own_loss(seed):
    model, x, y, _ = begun('relu_mlp', seed, 100)
    def loss_func(pred, y): return textbook_cross_entropy((pred*10).half(), y).float()
    return stepped(model, x, y, loss_func, FP16)


def large_scale(seed): return stepped(*begun('relu_mlp', seed, 100), FP16, 2.**24)


def small_updates(seed):
    model, x, y, loss_func = begun('relu_mlp', seed, 100)
    model.bfloat16()
    opt = torch.optim.Adam(model.parameters(), 1e-5)
    return stepped(model, x.bfloat16(), y, loss_func, opt=opt)


def few_bits(seed):
    model, x, y, loss_func = begun('two_towers', seed)
    model = simulate_fp8(model, RECIPES['tensorwise'])
    def step(): loss_func(predict(model, x), y).backward()
    return model, step


def drifted(seed):
    toy = get_toy('char_lm')
    model = toy.model(seed)
    nn.init.constant_(model.head.bias, 700.)
    return stepped(model, *next(batches(toy.data(), 16, 1, seed)), toy.loss_func, BF16)


class Leaky(nn.Module):
    "The integrator of the chapter: a state that moves by a thousandth of its input"
    def __init__(self, dtype=BF16, d=16):
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


def signals(start):
    "Sixteen noisy signals, and twice their means"
    g = torch.Generator().manual_seed(start)
    mean = torch.rand(16, 1, 1, generator=g)*2 - 1
    noise = .1*torch.randn(16, 256, 1, generator=g)
    return torch.cat([mean/2 + noise, torch.ones(16, 256, 1)], 2), mean[:, 0, 0]


def losses(seed, dtype, steps=60):
    "The integrator in training: the net, and its losses"
    torch.manual_seed(seed)
    net, data = Leaky(dtype), [signals(1000*seed + i) for i in range(steps)]
    if not steps: return net, []
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    return net, fit(net, data, opt, F.mse_loss, plain_step)['loss']


def leaky(seed, steps=0, dtype=BF16):
    net, _ = losses(seed, dtype, steps)
    net.zero_grad()
    return stepped(net, *signals(777), F.mse_loss)


def rotated(x, start, dtype):
    "Rotary positions from `start` on, with angles in `dtype`"
    pos = torch.arange(x.shape[1]) + start
    freq = 1e4**(-torch.arange(0, x.shape[2], 2)/x.shape[2])
    angle = pos.to(dtype)[:, None]*freq
    a, b = x[..., ::2], x[..., 1::2]
    return torch.cat([a*angle.cos() - b*angle.sin(), a*angle.sin() + b*angle.cos()], -1)


class Rotary(nn.Module):
    "Attention with rotary positions"
    def __init__(self, start, dtype=BF16, d=32):
        super().__init__()
        self.emb, self.qkv, self.head = nn.Embedding(32, d), nn.Linear(d, 3*d), nn.Linear(d, 32)
        self.at = start, dtype

    def forward(self, x):
        h = self.emb(x)
        q, k, v = self.qkv(h).chunk(3, -1)
        scores = rotated(q, *self.at)@rotated(k, *self.at).transpose(1, 2)/6
        return self.head(h + scores.softmax(-1)@v)


def positions(seed, start, dtype=BF16, length=32):
    def copied_token(pred, y): return F.cross_entropy(pred[:, 1:].flatten(0, 1), y[:, :-1].flatten())
    tokens = torch.randint(32, (2, length))
    return stepped(Rotary(start, dtype), tokens, tokens, copied_token)


class Norm(nn.Module):
    "A normalization by E[x²] − E[x]²"
    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        square = (x*x).mean(-1, keepdim=True)
        var = square - mean*mean
        return (x - mean)*(var + 1e-5).rsqrt()


def normed(seed):
    net = nn.Sequential(nn.Linear(64, 64), Norm(), nn.Linear(64, 10))
    nn.init.constant_(net[0].bias, 8.)
    x, y = torch.randn(32, 64), torch.randint(10, (32,))
    return stepped(net.bfloat16(), x.bfloat16(), y, F.cross_entropy)


class OnePassNorm(torch.autograd.Function):
    "A layer norm whose backward pass computes the variance in BF16, in one pass"
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.layer_norm(x, x.shape[-1:])

    @staticmethod
    def backward(ctx, g):
        x = ctx.saved_tensors[0]
        low = x.bfloat16()
        mean = low.mean(-1, keepdim=True)
        var = (low*low).mean(-1, keepdim=True) - mean*mean
        inverse = (var.float().clamp_min(0) + 1e-5).rsqrt()
        unit = (x - mean.float())*inverse
        return inverse*(g - g.mean(-1, keepdim=True) - unit*(g*unit).mean(-1, keepdim=True))


class CustomBackward(nn.Module):
    "Linear layers around that norm; its inputs have a mean of 8"
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 10)
        nn.init.constant_(self.a.bias, 8.)
    def forward(self, x): return self.b(OnePassNorm.apply(self.a(x)))


class AutocastInside(nn.Module):
    "Logits at 700, under an autocast of the model's own"
    def __init__(self):
        super().__init__()
        self.a, self.head = nn.Linear(32, 32), nn.Linear(32, 10)
        nn.init.constant_(self.head.bias, 700.)
    def forward(self, x):
        with torch.autocast('cpu', BF16): return self.head(self.a(x).relu())


def classes(net, n=64): return stepped(net, torch.randn(n, 32), torch.randint(10, (n,)), F.cross_entropy)
def custom_backward(seed): return classes(CustomBackward())
def autocast_inside(seed): return classes(AutocastInside())


def adam_epsilon(seed):
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).half()
    x, y = torch.randn(64, 32).half(), torch.randint(10, (64,))
    return stepped(net, x, y, F.cross_entropy, opt=torch.optim.Adam(net.parameters(), 1e-3))


class Padded(nn.Module):
    "Normalized embeddings, of which the padding's is zero"
    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(50, 32, padding_idx=0), nn.Linear(32, 50)
    def forward(self, x):
        unit = F.normalize(self.emb(x), dim=-1)
        return self.head(unit.mean(1))


def padding(seed):
    tokens = torch.randint(1, 50, (16, 12))
    tokens[:, -3:] = 0
    return stepped(Padded().half(), tokens, tokens[:, 0], F.cross_entropy)


def geodesic(seed):
    net, x = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4)), torch.randn(64, 8)
    with torch.no_grad(): want = F.normalize(net(x) + .005*torch.randn(64, 4), dim=-1)
    def loss_func(pred, want):
        cos = (F.normalize(pred, dim=-1).bfloat16()*want.bfloat16()).sum(-1)
        return 2*torch.acos(cos.clamp(-1 + 1e-7, 1 - 1e-7)).float().mean()
    return stepped(net, x, want, loss_func)


class TimeEmbedding(nn.Module):
    "A denoiser that is told the time in the activations' format"
    def __init__(self):
        super().__init__()
        self.inp, self.time, self.out = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 16)
    def forward(self, x, t):
        h = self.inp(x)
        freq = torch.exp(-math.log(1e4)*torch.arange(32)/32).to(h.dtype)
        angle = t[:, None].to(h.dtype)*freq
        return self.out(F.silu(h + self.time(torch.cat([angle.sin(), angle.cos()], -1))))


def diffusion_time(seed):
    x = torch.randn(64, 16), torch.randint(0, 1000, (64,))
    return stepped(TimeEmbedding(), x, torch.randn(64, 16), F.mse_loss, BF16)


class SignalToNoise(nn.Module):
    "A denoiser that weighs its output by a/(1 − a), from a buffer in half"
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 16))
        self.register_buffer('left', torch.cumprod(1 - torch.linspace(1e-4, .02, 1000), 0))
    def forward(self, x, t):
        a = self.left[t][:, None]
        snr = a/(1 - a)
        return self.net(x)*(snr.clamp(max=5)/snr)


def signal_to_noise(seed):
    model, t = SignalToNoise(), torch.randint(0, 1000, (64,))
    t[:8] = torch.arange(8)
    x, y = torch.randn(64, 16).bfloat16(), torch.randn(64, 16)
    def step():
        model.bfloat16()
        F.mse_loss(model(x, t).float(), y).backward()
    return model, step


class SegmentSums(nn.Module):
    "A state space layer's decays: differences of a running sum in BF16"
    def __init__(self):
        super().__init__()
        self.inp, self.rate, self.out = nn.Linear(8, 16), nn.Linear(8, 1), nn.Linear(16, 8)
    def forward(self, x):
        decay = -F.softplus(self.rate(x) + 1).squeeze(-1).to(BF16)
        total = decay.cumsum(-1)
        between = (total[:, :, None] - total[:, None, :]).tril().exp().tril()
        return self.out(between.float()@self.inp(x)/10)


class LinearAttention(nn.Module):
    "Linear attention whose sums are kept in BF16"
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 48), nn.Linear(16, 8)
    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        s, z = torch.zeros(len(x), 16, 16, dtype=BF16), torch.zeros(len(x), 16, dtype=BF16)
        outs = []
        for t in range(x.shape[1]):
            s = s + (k[:, t, :, None]*v[:, t, None, :]).bfloat16()
            z = z + k[:, t].bfloat16()
            top = torch.einsum('bd,bde->be', q[:, t], s.float())
            outs.append(top/(q[:, t]*z.float()).sum(-1, keepdim=True))
        return self.out(torch.stack(outs, 1))


def sequence(net, length): return stepped(net, torch.randn(2, length, 8), torch.randn(2, length, 8), F.mse_loss)
def segment_sums(seed): return sequence(SegmentSums(), 512)
def linear_attention(seed): return sequence(LinearAttention(), 400)


def policy_ratio(seed):
    net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 50))
    x, action, gain = torch.randn(64, 16), torch.randint(50, (64,)), torch.randn(64)
    def of(pred): return pred.log_softmax(-1).gather(1, action[:, None])[:, 0]
    with torch.no_grad(): old = of(net(x))
    def loss_func(pred, old):
        ratio = (of(pred) - old).exp()
        return -torch.min(ratio*gain, ratio.clamp(.8, 1.2)*gain).mean()
    return stepped(net, x, old, loss_func, BF16)


def preference(seed, pairs):
    net = nn.Sequential(nn.Embedding(64, 32), nn.Tanh(), nn.Linear(32, 64))
    other = copy.deepcopy(net)
    with torch.no_grad():
        for p in net.parameters(): p += 1e-3*torch.randn_like(p)
    net, other = net.bfloat16(), other.bfloat16()
    good, bad = torch.randint(64, (pairs, 512)), torch.randint(64, (pairs, 512))
    def score(model, t):
        logp = model(t[:, :-1]).log_softmax(-1)
        return logp.gather(2, t[:, 1:, None])[..., 0].sum(-1)
    def step():
        with torch.no_grad(): of_good, of_bad = score(other, good), score(other, bad)
        margin = (score(net, good) - of_good) - (score(net, bad) - of_bad)
        (-F.logsigmoid(.1*margin.float()).mean()).backward()
    return net, step


class Cone(nn.Module):
    "Unit vectors that nearly agree, compared at a low temperature"
    def __init__(self): super().__init__(); self.lin = nn.Linear(32, 64)
    def forward(self, x):
        z = F.normalize(self.lin(x)*.1 + 1, dim=-1)
        return z@z.T/.02


def cone(seed): return stepped(Cone(), torch.randn(64, 32), torch.arange(64), F.cross_entropy, BF16)


class Codebook(nn.Module):
    "A quantizer whose codes are an average in BF16, replaced in each step"
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(16, 8), nn.Linear(8, 16)
        self.register_buffer('code', torch.randn(32, 8).bfloat16())
    def forward(self, x):
        z = self.enc(x)
        nearest = torch.cdist(z, self.code.float()).argmin(-1)
        with torch.no_grad():
            one = F.one_hot(nearest, 32).float()
            mean = one.T@z/one.sum(0).clamp(min=1)[:, None]
            self.code = self.code*.999 + (.001*mean).bfloat16()
        return self.dec(z + (self.code.float()[nearest] - z).detach())


def codebook(seed):
    x = torch.randn(64, 16)
    return stepped(Codebook(), x, x, F.mse_loss)


class DoubledMask(nn.Module):
    "Attention to which two masks of the lowest number are added"
    def __init__(self):
        super().__init__()
        self.emb, self.qkv, self.out = nn.Embedding(32, 32), nn.Linear(32, 96), nn.Linear(32, 32)
    def forward(self, t, pad):
        q, k, v = self.qkv(self.emb(t)).chunk(3, -1)
        lowest = torch.finfo(FP16).min
        future = torch.full((16, 16), lowest).triu(1)
        mask = (future + pad[:, None]*lowest).to(q.dtype)
        return self.out((q@k.mT/6 + mask).softmax(-1)@v)


def doubled_mask(seed):
    tokens, pad = torch.randint(32, (4, 16)), torch.zeros(4, 16)
    pad[:, :4] = 1
    def loss_func(pred, y): return F.cross_entropy(pred.flatten(0, 1), y.flatten())
    return stepped(DoubledMask().half(), (tokens, pad), tokens, loss_func)


class Opacity(nn.Module):
    "Volume rendering of what is nearly transparent"
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
        nn.init.constant_(self.net[2].bias, -8.)
    def forward(self, x):
        density = F.softplus(self.net(x))
        alpha = 1 - torch.exp(-density*.5)
        return alpha*1e3


def opacity(seed):
    return stepped(Opacity().bfloat16(), torch.randn(256, 8).bfloat16(), torch.rand(256, 1), F.mse_loss)


class Flow(nn.Module):
    "A differential equation in small steps, its state in BF16"
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
    def forward(self, x):
        h = x.bfloat16()
        for _ in range(400):
            h = h + (self.f(h.float())/400).bfloat16()
        return h.float()


def flow(seed): return stepped(Flow(), torch.randn(32, 8), torch.randn(32, 8), F.mse_loss)


class RunningScale(nn.Module):
    "A divisor that follows the largest output, one number in BF16"
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.register_buffer('size', torch.full((1,), 3., dtype=BF16))
    def forward(self, x):
        y = self.lin(x)
        with torch.no_grad(): self.size.lerp_(y.abs().max().bfloat16(), .001)
        return y/self.size.float()


def running_scale(seed):
    x = torch.randn(32, 8)
    return stepped(RunningScale(), x, x, F.mse_loss)


FAULTS = { # row -> (a part of the line, what makes it)
    'gradients of a deep net in FP16': ('', underflow),
    'a loss without a maximum in FP16': ('exp()', own_loss),
    'a loss scale of 2^24': ('pred.float()', large_scale),
    'BF16 weights at a rate of 1e-5': ('opt.step()', small_updates),
    'two towers in FP8': ('', few_bits),
    'logits at 700': ('self.head(', drifted),
    **{f'leaky after {n} steps': ('k*(u[:, t] - h)', partial(leaky, steps=n)) for n in (0, 1, 5, 20, 60)},
    'positions from 4,096 in BF16': ('pos.to(dtype)', partial(positions, start=4096)),
    'positions from 8,192 in FP16': ('pos.to(dtype)', partial(positions, start=8192, dtype=FP16)),
    'positions to 1,023 in BF16': ('pos.to(dtype)', partial(positions, start=0, length=1024)),
    'a variance in one pass': ('mean', normed),
    'a backward pass in BF16': ('- mean*mean', custom_backward),
    'autocast inside the model': ('self.head(', autocast_inside),
    "Adam's epsilon in FP16": ('opt.step()', adam_epsilon),
    'a padding of zeros in FP16': ('F.normalize', padding),
    'an angle near zero': ('.sum(-1)', geodesic),
    'time in BF16': ('t[:, None].to(h.dtype)', diffusion_time),
    'signal to noise of a BF16 buffer': ('a/(1 - a)', signal_to_noise),
    'segment sums': ('total', segment_sums),
    'sums of linear attention': (' + ', linear_attention),
    'ratio of two policies': ('(of(pred) - old)', policy_ratio),
    'eight preferences': ('', partial(preference, pairs=8)),
    'one preference': ('margin =', partial(preference, pairs=1)),
    'vectors in a cone': ('', cone),
    'a codebook in BF16': ('self.code*.999', codebook),
    'two masks in FP16': ('mask', doubled_mask),
    'opacity near zero': ('1 - torch.exp', opacity),
    'a flow in 400 steps': ('h + (self.f', flow),
    'a state of one number': ('lerp_', running_scale)}
