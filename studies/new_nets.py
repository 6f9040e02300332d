"""Do schemes do on other nets what they do on those of chapter 33? Eleven nets that fail in other
ways (chapter 34)

These nets were written down before a rule of chapter 34's advisor was chosen, and are there to
judge it. A row is a net and a scheme, as in `studies/every_scheme.py`; the score is the loss on
new data.
"""
import math
from functools import partial

import torch, torch.nn.functional as F
from torch import nn

from every_scheme import Adam, attempted
from mpcourse.advise import STEPS, STORED
from mpcourse.compare import Training, toy_training
from mpcourse.toys import batches, cross_entropy, digits, evaluate, fit, mlp, relu_mlp, seeded


def on_digits(model, seed, loss=cross_entropy, lr=3e-3, steps=120, opt=Adam, **how):
    "Digits, judged by the loss on new ones"
    data = digits()
    return Training(model, partial(opt, lr=lr, **how), loss,
                    lambda: batches(data, 128, steps, seed),
                    lambda model: evaluate(model, data, loss)['loss'])


class Experts(nn.Module):
    "A router weighs four experts; a column more than classes carries the balance loss"
    def __init__(self):
        super().__init__()
        self.flat, self.router = nn.Flatten(), nn.Linear(64, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
                                     for _ in range(4))

    def forward(self, x):
        x = self.flat(x)
        weights = self.router(x).softmax(1)
        out = sum(weights[:, i:i + 1]*f(x) for i, f in enumerate(self.experts))
        return torch.cat([out, weights], 1)


def experts(seed):
    "Experts whose router has a small loss of its own"
    def loss(pred, y):
        return F.cross_entropy(pred[:, :10], y) + .01*4*pred[:, 10:].mean(0).square().sum()
    with seeded(seed): model = Experts()
    t = on_digits(model, seed, loss)
    data = digits()
    t.score = lambda model: loss(model(data.valid[0]), data.valid[1]).item()
    return t


class Flow(nn.Module):
    "Four affine couplings in the plane: points to (latent, log of the volume's change)"
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)) for _ in range(4))

    def forward(self, x):
        a, b, volume = x[:, :1], x[:, 1:], 0.
        for f in self.parts:
            log_s, shift = f(a).chunk(2, 1)
            log_s = log_s.tanh()*2
            a, b, volume = b*log_s.exp() + shift, a, volume + log_s
        return torch.cat([a, b, volume], 1)


def moons(n, gen):
    "Two half circles"
    angle, side = math.pi*torch.rand(n, generator=gen), torch.randint(2, (n,), generator=gen)
    x = torch.stack([angle.cos() + side, (angle.sin() - .25)*(1 - 2*side)], 1)
    return x + .05*torch.randn(n, 2, generator=gen)


def flow(seed):
    "A normalizing flow"
    gen = torch.Generator().manual_seed(seed)
    new = moons(2048, gen)
    def loss(pred, y): return (pred[:, :2].square().sum(1)/2 - pred[:, 2]).mean()
    def drawn():
        gen = torch.Generator().manual_seed(seed + 1000)
        for _ in range(150): yield moons(128, gen), torch.zeros(128)
    with seeded(seed): model = Flow()
    return Training(model, partial(Adam, lr=3e-3), loss, drawn,
                    lambda model: loss(model(new), None).item())


class FourPixels(nn.Module):
    "A recurrent net of two linear layers that reads 64 pixels, four after four"
    def __init__(self, d=64):
        super().__init__()
        self.inp, self.own, self.out = nn.Linear(4, d), nn.Linear(d, d), nn.Linear(d, 10)
        nn.init.eye_(self.own.weight)

    def forward(self, x):
        x = x.flatten(1)
        h = self.own.weight.new_zeros(len(x), self.own.out_features)
        for pixels in x.split(4, 1): h = (self.inp(pixels) + self.own(h)).tanh()
        return self.out(h)


def pixels(seed):
    "A long recurrence"
    with seeded(seed): model = FourPixels()
    return on_digits(model, seed, lr=1e-3)


def tied(seed):
    "The net on text, whose readout is the embedding"
    t = toy_training('char_lm', seed, 60)
    with seeded(seed): nn.init.normal_(t.model.tok.weight, std=.05)
    t.model.head.weight = t.model.tok.weight
    return t


def focal(seed):
    "A loss that hardly counts what is nearly right: (1 - p)^4"
    def loss(pred, y):
        ce = F.cross_entropy(pred, y, reduction='none')
        return ((1 - (-ce).exp())**4*ce).mean()
    return on_digits(relu_mlp(seed), seed, loss)


class Outliers(nn.Module):
    "A norm behind the first layer takes out the size of the inputs"
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.rest = nn.Linear(32, 128, bias=False), nn.LayerNorm(128), nn.Sequential(nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 8))

    def forward(self, x): return self.rest(self.norm(self.first(x)))


def of_numbers(model, seed, f, size=1., steps=200, loss=F.mse_loss, lr=3e-3, n=2048):
    "A function of 32 normal numbers, some of them larger"
    gen = torch.Generator().manual_seed(seed)
    a = torch.randn(32, 8, generator=gen)/32**.5
    def draw(n, gen):
        x = torch.randn(n, 32, generator=gen)
        y = f(x @ a)
        x[::16] *= size
        return x, y
    x, y = draw(n, gen)
    def drawn():
        gen = torch.Generator().manual_seed(seed + 1000)
        for _ in range(steps): yield draw(128, gen)
    return Training(model, partial(Adam, lr=lr), loss, drawn,
                    lambda model: loss(model(x), y).item())


def outliers(seed):
    "One input in sixteen is 2^12 times larger"
    with seeded(seed): model = Outliers()
    return of_numbers(model, seed, torch.tanh, 2.**12)


def prices(seed):
    "Targets around half a million, predicted as they are; the loss is relative"
    with seeded(seed): model = nn.Sequential(mlp([32, 128, 128, 8], seed=seed), Times(3e5))
    def loss(pred, y): return F.mse_loss(pred/3e5, y/3e5)
    return of_numbers(model, seed, lambda z: 3e5*(1 + z.tanh()), loss=loss)


class Times(nn.Module):
    "A constant factor"
    def __init__(self, k):
        super().__init__()
        self.k = k

    def forward(self, x): return x*self.k


def contrast(seed, temperature=.01):
    "Two noisy views of a digit find each other, at a low temperature"
    data = digits()
    with seeded(seed): model = nn.Sequential(mlp([64, 128, 32], seed=seed))
    def loss(pred, y):
        a, b = F.normalize(pred, dim=1).chunk(2)
        return F.cross_entropy(a @ b.T/temperature, torch.arange(len(a)))
    def views(x, gen):
        return torch.cat([x + .15*torch.randn(x.shape, generator=gen) for _ in range(2)])
    def drawn():
        gen = torch.Generator().manual_seed(seed)
        for x, y in batches(data, 128, 150, seed): yield views(x, gen), y
    new = views(data.valid[0], torch.Generator().manual_seed(0))
    return Training(model, partial(Adam, lr=2e-3), loss, drawn,
                    lambda model: loss(model(new), None).item())


def fine_tuned(seed):
    "A net that has learnt, and learns on from noisier pictures at a small rate"
    model = relu_mlp(seed)
    with seeded(seed):
        fit(model, batches(digits(), 128, 150, seed), Adam(model.parameters(), lr=3e-3))
    def tilted(x): return x.transpose(-1, -2)
    data = digits()
    def drawn():
        for x, y in batches(data, 128, 200, seed): yield tilted(x), y
    x, y = data.valid
    return Training(model, partial(Adam, lr=5e-5), cross_entropy, drawn,
                    lambda model: cross_entropy(model(tilted(x)), y).item())


class Residual(nn.Module):
    "Blocks that add what they make, and no norm"
    def __init__(self, d=64, blocks=12):
        super().__init__()
        self.inp, self.out = nn.Sequential(nn.Flatten(), nn.Linear(64, d)), nn.Linear(d, 10)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, d))
                                    for _ in range(blocks))
        for b in self.blocks: nn.init.normal_(b[2].weight, std=(2/d)**.5)

    def forward(self, x):
        x = self.inp(x)
        for b in self.blocks: x = x + b(x)
        return self.out(x)/2**14


def residual(seed):
    "A residual stream that grows block by block"
    with seeded(seed): model = Residual()
    return on_digits(model, seed, lr=3e-4)


def large_mean(seed, parts=2**12):
    "Digits, as one of 4,096 micro-batches"
    t = on_digits(relu_mlp(seed), seed, lambda pred, y: cross_entropy(pred, y)/parts,
                  eps=1e-8/parts)
    return t


NETS = dict(experts=experts, flow=flow, pixels=pixels, tied=tied, focal=focal, outliers=outliers,
            prices=prices,
            contrast=contrast, fine_tuned=fine_tuned, residual=residual, large_mean=large_mean)
ROWS = [f'{net}: {scheme}' for net in NETS for scheme in ('FP32', *STEPS, *STORED)]
SEEDS = range(3)


def run(row, seed):
    "Score before and after the training, and the steps skipped"
    return attempted(NETS, row, seed)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
