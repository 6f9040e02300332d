"""Forty small nets that train in BF16 and FP16 as in FP32, for `sanitized_faults` (chapter 18)

`NETS`: name -> (what makes the net, what makes the batch of a number, the loss).
"""
import torch, torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import mpcourse.zoo  # noqa: F401
from mpcourse.toys import batches, get_toy

CE, MSE = F.cross_entropy, F.mse_loss


def generator(k): return torch.Generator().manual_seed(k)
def vectors(k, n=64): return torch.randn(n, 32, generator=generator(k))
def labelled(k):
    x = vectors(k)
    return x, (x@torch.randn(32, 10, generator=generator(-1))).argmax(-1)
def itself(k): return vectors(k), vectors(k)
def counting(k, n=16, length=24):
    "Each sequence counts by a number of its own"
    g = generator(k)
    x = torch.randint(32, (n, 1), generator=g) + torch.arange(length + 1)*torch.randint(1, 4, (n, 1), generator=g)
    return x[:, :-1] % 32, x[:, 1:] % 32
def pictures(k, n=32):
    "Ten noisy patterns"
    g, patterns = generator(k), torch.randn(10, 3, 16, 16, generator=generator(-2))
    y = torch.randint(10, (n,), generator=g)
    return patterns[y] + .5*torch.randn(n, 3, 16, 16, generator=g), y
def picture_itself(k): return pictures(k)[:1]*2
def plane(k):
    x = torch.rand(256, 2, generator=generator(k))*2 - 1
    return x, torch.sin(3*x[:, :1])*torch.cos(2*x[:, 1:])
def tokens(pred, y): return CE(pred.flatten(0, 1), y.flatten())
def diagonal(pred, y): return CE(pred, torch.arange(len(pred)))


def mlp(*widths, act=nn.ReLU, norm=None):
    layers = []
    for a, b in zip(widths, widths[1:]):
        layers.append(nn.Linear(a, b))
        if norm is not None: layers.append(norm(b))
        layers.append(act())
    while not isinstance(layers[-1], nn.Linear): layers.pop()
    return nn.Sequential(*layers)


class Cell(nn.Module):
    "A recurrent cell, called in a loop"
    def __init__(self, cell):
        super().__init__()
        self.emb, self.cell, self.out = nn.Embedding(32, 32), cell(32, 32), nn.Linear(32, 32)
    def forward(self, x):
        h, outs = torch.zeros(len(x), 32), []
        for t in range(x.shape[1]):
            h = self.cell(self.emb(x[:, t]), h)
            outs.append(self.out(h))
        return torch.stack(outs, 1)


class Layers(nn.Module):
    "A whole recurrent layer"
    def __init__(self):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(32, 32), nn.GRU(32, 32, batch_first=True), nn.Linear(32, 32)
    def forward(self, x): return self.out(self.rnn(self.emb(x))[0])


class Residual(nn.Module):
    "Residual blocks, whose output may begin near zero"
    def __init__(self, scale, depth=12):
        super().__init__()
        self.inp, self.out = nn.Linear(32, 64), nn.Linear(64, 10)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(64), mlp(64, 128, 64, act=nn.GELU)) for _ in range(depth))
        self.scales = nn.ParameterList(torch.full((64,), scale) for _ in range(depth))
    def forward(self, x):
        h = self.inp(x)
        for block, scale in zip(self.blocks, self.scales): h = h + scale*block(h)
        return self.out(h)


class Experts(nn.Module):
    "Four experts: the best two weighted, or the best one by a mask"
    def __init__(self, by_mask):
        super().__init__()
        self.inp, self.router, self.out, self.by_mask = nn.Linear(32, 64), nn.Linear(64, 4), nn.Linear(64, 10), by_mask
        self.experts = nn.ModuleList(mlp(64, 64, 64, act=nn.GELU) for _ in range(4))
    def forward(self, x):
        h = self.inp(x)
        share = self.router(h).softmax(-1)
        if not self.by_mask:
            weight, i = share.topk(2)
            each = torch.stack([expert(h) for expert in self.experts], 1)
            taken = each.gather(1, i[..., None].expand(-1, -1, 64))
            return self.out(h + (weight[..., None]*taken).sum(1))
        (weight, i), y = share.max(-1), torch.zeros_like(h)
        for k, expert in enumerate(self.experts):
            y[i == k] = (weight[i == k, None]*expert(h[i == k])).to(y.dtype)
        return self.out(h + y)


class Modulated(nn.Module):
    "A block whose norm is set by the input, and begins as the identity"
    def __init__(self):
        super().__init__()
        self.inp, self.cond, self.out = nn.Linear(32, 64), nn.Linear(32, 192), nn.Linear(64, 10)
        self.norm, self.block = nn.LayerNorm(64, elementwise_affine=False), mlp(64, 128, 64, act=nn.SiLU)
        nn.init.zeros_(self.cond.weight)
        nn.init.zeros_(self.cond.bias)
    def forward(self, x):
        h, (a, b, gate) = self.inp(x), self.cond(x).chunk(3, -1)
        return self.out(h + gate*self.block(self.norm(h)*(1 + a) + b))


class Variational(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.mean, self.logvar, self.dec = nn.Linear(32, 64), nn.Linear(64, 16), nn.Linear(64, 16), nn.Linear(16, 32)
    def forward(self, x):
        h = self.enc(x).relu()
        mean, logvar = self.mean(h), self.logvar(h)
        return self.dec(mean + torch.randn_like(mean)*(logvar/2).exp()), mean, logvar
def evidence(pred, y): return MSE(pred[0], y) + .01*(pred[1]**2 + pred[2].exp() - 1 - pred[2]).mean()


class Features(nn.Module):
    "Returns its features for a second loss"
    def __init__(self): super().__init__(); self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 10)
    def forward(self, x):
        h = self.a(x).relu()
        return self.b(h), h
def with_features(pred, y): return CE(pred[0], y) + .01*pred[1].square().mean()


class Encoder(nn.Module):
    def __init__(self, norm_first):
        super().__init__()
        self.emb, self.pos, self.out = nn.Embedding(32, 64), nn.Parameter(torch.randn(24, 64)*.02), nn.Linear(64, 32)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 128, .1, 'gelu', batch_first=True, norm_first=norm_first) for _ in range(3))
    def forward(self, x):
        h, mask = self.emb(x) + self.pos, nn.Transformer.generate_square_subsequent_mask(24)
        for layer in self.layers: h = layer(h, src_mask=mask, is_causal=True)
        return self.out(h)


class RMS(nn.Module):
    def __init__(self, d): super().__init__(); self.weight = nn.Parameter(torch.ones(d))
    def forward(self, x):
        wide = x.float()
        return (wide*torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)*self.weight


class LlamaBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.first, self.second = RMS(d), RMS(d)
        self.qkv, self.proj = nn.Linear(d, 3*d, bias=False), nn.Linear(d, d, bias=False)
        self.gate, self.up, self.down = nn.Linear(d, 2*d, bias=False), nn.Linear(d, 2*d, bias=False), nn.Linear(2*d, d, bias=False)
    def turned(self, x):
        angle = torch.outer(torch.arange(x.shape[-2]).float(), 1e4**(-torch.arange(0, x.shape[-1], 2)/x.shape[-1]))
        a, b = x.chunk(2, -1)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        return torch.cat([a*cos - b*sin, a*sin + b*cos], -1)
    def forward(self, h):
        q, k, v = [z.unflatten(-1, (4, -1)).transpose(1, 2) for z in self.qkv(self.first(h)).chunk(3, -1)]
        mixed = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        h = h + self.proj(mixed.transpose(1, 2).flatten(2))
        x = self.second(h)
        return h + self.down(F.silu(self.gate(x))*self.up(x))


class Llama(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.emb, self.blocks, self.norm = nn.Embedding(32, d), nn.Sequential(*(LlamaBlock(d) for _ in range(3))), RMS(d)
    def forward(self, x): return F.linear(self.norm(self.blocks(self.emb(x))), self.emb.weight)


class Waves(nn.Module):
    "Sines as activations"
    def __init__(self): super().__init__(); self.a, self.b, self.c = nn.Linear(2, 64), nn.Linear(64, 64), nn.Linear(64, 1)
    def forward(self, x): return self.c(torch.sin(self.b(torch.sin(5*self.a(x)))))


class Graph(nn.Module):
    "Messages along random edges"
    def __init__(self): super().__init__(); self.a, self.b, self.c = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 10)
    def forward(self, x):
        here, there = torch.randint(len(x), (2, 256), generator=generator(1))
        h = self.a(x).relu()
        got = torch.zeros_like(h).index_add_(0, there, h[here])
        return self.c(self.b(h + got/4).relu())


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.down, self.up = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, 2, 1), nn.ConvTranspose2d(32, 16, 2, 2)
        self.norm, self.out = nn.GroupNorm(4, 16), nn.Conv2d(32, 3, 1)
    def forward(self, x):
        h = self.norm(self.a(x)).relu()
        return self.out(torch.cat([h, self.up(self.down(h).relu())], 1))


class Pairs(nn.Module):
    "Two views, and a temperature that is learned"
    def __init__(self): super().__init__(); self.a, self.b, self.heat = nn.Linear(32, 32), nn.Linear(32, 32), nn.Parameter(torch.tensor(2.6))
    def forward(self, x): return F.normalize(self.a(x), dim=-1)@F.normalize(self.b(x + .1), dim=-1).T*self.heat.exp()


class Codes(nn.Module):
    "A quantizer that learns its codes"
    def __init__(self): super().__init__(); self.enc, self.dec, self.code = nn.Linear(32, 8), nn.Linear(8, 32), nn.Parameter(torch.randn(64, 8))
    def forward(self, x):
        z = self.enc(x)
        q = self.code[torch.cdist(z.float(), self.code.float()).argmin(-1)]
        return self.dec(z + (q - z).detach()), z, q
def commitment(pred, y): return MSE(pred[0], y) + MSE(pred[2], pred[1].detach()) + .25*MSE(pred[1], pred[2].detach())


class Excited(nn.Module):
    "A convolution whose channels are weighted"
    def __init__(self):
        super().__init__()
        self.conv, self.gate, self.out = nn.Conv2d(3, 32, 3, padding=1), mlp(32, 8, 32), nn.Linear(32, 10)
    def forward(self, x):
        h = self.conv(x).relu()
        return self.out((h*self.gate(h.mean((2, 3))).sigmoid()[..., None, None]).mean((2, 3)))


class Mixer(nn.Module):
    "Patches mixed by linear layers"
    def __init__(self):
        super().__init__()
        self.patch, self.out = nn.Conv2d(3, 32, 4, 4), nn.Linear(32, 10)
        self.across, self.within = mlp(16, 32, 16, act=nn.GELU), mlp(32, 64, 32, act=nn.GELU)
        self.first, self.second = nn.LayerNorm(32), nn.LayerNorm(32)
    def forward(self, x):
        h = self.patch(x).flatten(2).mT
        h = h + self.across(self.first(h).mT).mT
        return self.out((h + self.within(self.second(h))).mean(1))


class Penalized(nn.Module):
    "A net and its derivative, as in physics-informed training"
    def __init__(self): super().__init__(); self.net = mlp(2, 64, 64, 1, act=nn.Tanh)
    def forward(self, x):
        x = x.detach().requires_grad_()
        u = self.net(x)
        slope, = torch.autograd.grad(u.sum(), x, create_graph=True)
        return u + .1*slope.square().sum(1, keepdim=True)


class Adapted(nn.Module):
    "Low-rank adapters on a frozen layer"
    def __init__(self):
        super().__init__()
        self.base, self.down, self.up, self.out = nn.Linear(32, 64), nn.Linear(32, 4, bias=False), nn.Linear(4, 64, bias=False), nn.Linear(64, 10)
        self.base.requires_grad_(False)
        nn.init.zeros_(self.up.weight)
    def forward(self, x): return self.out((self.base(x) + 2*self.up(self.down(x))).relu())


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.a, self.block, self.out, self.reentrant = nn.Linear(32, 64), mlp(64, 64, 64), nn.Linear(64, 10), reentrant
    def forward(self, x):
        def block(h): return self.block(h.bfloat16().to(h.dtype))
        return self.out(torch.utils.checkpoint.checkpoint(block, self.a(x), use_reentrant=self.reentrant))


class Sets(nn.Module):
    "Sums over the members of a set, and attention with one query"
    def __init__(self): super().__init__(); self.a, self.query, self.out = nn.Linear(4, 32), nn.Parameter(torch.randn(32)/6), nn.Linear(64, 10)
    def forward(self, x):
        h = self.a(x.unflatten(1, (8, 4))).relu()
        return self.out(torch.cat([h.sum(1), ((h@self.query).softmax(1)[..., None]*h).sum(1)], 1))


def conv(): return nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1),
    nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
def depthwise(): return nn.Sequential(
    nn.Conv2d(3, 16, 1), nn.GELU(), nn.Conv2d(16, 16, 7, padding=3, groups=16), nn.GroupNorm(1, 16), nn.Hardswish(),
    nn.AvgPool2d(4), nn.Flatten(), nn.Linear(256, 10))
def along(): return nn.Sequential(
    nn.Unflatten(1, (1, 32)), nn.Conv1d(1, 16, 5, padding=2), nn.InstanceNorm1d(16, affine=True), nn.ELU(), nn.Flatten(),
    nn.Linear(512, 10))
def spectral(): return nn.Sequential(
    parametrizations.spectral_norm(nn.Linear(32, 64)), nn.LeakyReLU(), parametrizations.spectral_norm(nn.Linear(64, 10)))
def weighted(): return nn.Sequential(parametrizations.weight_norm(nn.Linear(32, 64)), nn.SiLU(), nn.Linear(64, 10))
def dropped(): return nn.Sequential(mlp(32, 64, 64, act=nn.Tanh), nn.Dropout(.2), nn.Linear(64, 10))
def focal(pred, y):
    logp = F.log_softmax(pred, -1).gather(1, y[:, None])[:, 0]
    return -((1 - logp.exp())**2*logp).mean()
def smooth(pred, y): return CE(pred, y, label_smoothing=.1)
def pinball(pred, y): return torch.maximum(.9*(y - pred), .1*(pred - y)).mean()
def hinge(pred, y): return F.multi_margin_loss(pred, y)
def both(pred, y): return F.binary_cross_entropy_with_logits(pred, F.one_hot(y, 10).float())


def toy(name):
    "A net of the course"
    t = get_toy(name)
    return lambda: t.model(int(torch.randint(1000, ()))), lambda k: next(batches(t.data(), 16, 1, k)), t.loss_func


NETS = {
    'mlp': (lambda: mlp(32, 64, 64, 10), labelled, CE), 'gru cell': (lambda: Cell(nn.GRUCell), counting, tokens),
    'rnn cell': (lambda: Cell(nn.RNNCell), counting, tokens), 'gru layer': (Layers, counting, tokens),
    'small residuals': (lambda: Residual(1e-4), labelled, CE), 'residuals': (lambda: Residual(1.), labelled, CE),
    'top 2 experts': (lambda: Experts(False), labelled, CE), 'experts by mask': (lambda: Experts(True), labelled, CE),
    'conv': (conv, pictures, CE), 'depthwise': (depthwise, pictures, CE), 'conv 1d': (along, labelled, CE),
    'u-net': (UNet, picture_itself, MSE), 'mixer': (Mixer, pictures, CE), 'excited': (Excited, pictures, CE),
    'spectral norm': (spectral, labelled, CE), 'weight norm': (weighted, labelled, CE), 'modulated': (Modulated, labelled, CE),
    'variational': (Variational, itself, evidence), 'features': (Features, labelled, with_features), 'codes': (Codes, itself, commitment),
    'encoder, norm first': (lambda: Encoder(True), counting, tokens), 'encoder, norm last': (lambda: Encoder(False), counting, tokens),
    'llama': (Llama, counting, tokens), 'waves': (Waves, plane, MSE), 'slopes': (Penalized, plane, MSE), 'graph': (Graph, labelled, CE),
    'pairs': (Pairs, labelled, diagonal), 'sets': (Sets, labelled, CE), 'adapters': (Adapted, labelled, CE),
    'dropout, focal loss': (dropped, labelled, focal), 'label smoothing': (lambda: mlp(32, 64, 10, act=nn.ELU), labelled, smooth),
    'pinball loss': (lambda: mlp(2, 64, 1, act=nn.Softplus), plane, pinball), 'hinge loss': (lambda: mlp(32, 64, 10, norm=nn.LayerNorm), labelled, hinge),
    'ten questions': (lambda: mlp(32, 64, 10, act=nn.Mish, norm=nn.BatchNorm1d), labelled, both),
    'checkpoint': (lambda: Checkpointed(False), labelled, CE), 'reentrant checkpoint': (lambda: Checkpointed(True), labelled, CE),
    **{name: toy(name) for name in ('char_lm', 'relu_mlp', 'cnn', 'deep_sigmoid')}}
