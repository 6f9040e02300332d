"""The price of unit scaling: training steps of one transformer in plain ops, in ours, and in the `unit-scaling` package's where it is installed."""
import importlib, warnings

import torch, torch.nn.functional as F
from harness import Row, medians, ratio
from mpcourse import unit as U
from torch import nn


class Plain:
    "Ordinary ops and ordinary sizes of weights"
    @staticmethod
    def weight(out, inp): return torch.randn(out, inp)*inp**-.5
    embedding, linear, readout = staticmethod(lambda ids, w: F.embedding(ids, w)), staticmethod(lambda x, w: F.linear(x, w)), staticmethod(lambda x, w: F.linear(x, w))
    norm = staticmethod(lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b))
    gelu, loss = staticmethod(F.gelu), staticmethod(F.cross_entropy)
    attention = staticmethod(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    split, add = staticmethod(lambda x: (x, x)), staticmethod(lambda b, s: s + b)


class Ours:
    "mpcourse.unit"
    @staticmethod
    def weight(out, inp): return torch.randn(out, inp)
    embedding, linear, readout = staticmethod(U.unit_embedding), staticmethod(U.unit_linear), staticmethod(U.unit_readout)
    norm = staticmethod(lambda x, w, b: U.unit_layer_norm(x, x.shape[-1:], w, b))
    gelu, loss = staticmethod(U.unit_gelu), staticmethod(U.unit_cross_entropy)
    attention = staticmethod(lambda q, k, v: U.unit_attention(q, k, v, True))
    split, add = staticmethod(lambda x: U.residual_split(x, .3)), staticmethod(lambda b, s: U.residual_add(b, s, .3))


def peer():
    "The same architecture in the package's ops; None where it is not installed"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            L = importlib.import_module('unit_scaling.functional')
    except ImportError: return None
    class Peer(Ours):
        embedding = staticmethod(lambda ids, w: L.embedding(ids, w))
        linear, readout = staticmethod(lambda x, w: L.linear(x, w, None)), staticmethod(lambda x, w: L.linear_readout(x, w, None))
        norm = staticmethod(lambda x, w, b: L.layer_norm(x, x.shape[-1:], w, b))
        gelu, loss = staticmethod(L.gelu), staticmethod(L.cross_entropy)
        attention = staticmethod(lambda q, k, v: L.scaled_dot_product_attention(q, k, v, is_causal=True))
        split, add = staticmethod(lambda x: L.residual_split(x, .65)), staticmethod(lambda b, s: L.residual_add(b, s, .65))
    return Peer


class Transformer(nn.Module):
    "A pre-norm character transformer whose ops come from a class"
    def __init__(self, ops, d, layers, context, heads=2, n_out=96):
        super().__init__()
        self.ops, self.heads, self.layers = ops, heads, layers
        def par(*shape): return nn.Parameter(ops.weight(*shape))
        self.tok, self.pos, self.head = nn.Parameter(torch.randn(n_out, d)), nn.Parameter(torch.randn(context, d)), par(n_out, d)
        self.ps = nn.ParameterDict()
        for i in range(layers):
            self.ps |= {f'qkv{i}': par(3*d, d), f'out{i}': par(d, d), f'up{i}': par(4*d, d),
                        f'down{i}': par(d, 4*d)}
            self.ps |= {f'{n}{i}': nn.Parameter(f(d))
                        for n, f in dict(g1=torch.ones, b1=torch.zeros, g2=torch.ones,
                                         b2=torch.zeros).items()}

    def attend(self, x, i):
        b, t, d = x.shape
        qkv = self.ops.linear(x, self.ps[f'qkv{i}']).view(b, t, 3, self.heads, d//self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        return self.ops.linear(self.ops.attention(q, k, v).transpose(1, 2).reshape(b, t, d),
                               self.ps[f'out{i}'])

    def forward(self, ids, y):
        o, p = self.ops, self.ps
        x = o.embedding(ids, self.tok) + self.pos
        for i in range(self.layers):
            b, s = o.split(x)
            x = o.add(self.attend(o.norm(b, p[f'g1{i}'], p[f'b1{i}']), i), s)
            b, s = o.split(x)
            x = o.add(o.linear(o.gelu(o.linear(o.norm(b, p[f'g2{i}'], p[f'b2{i}']), p[f'up{i}'])),
                               p[f'down{i}']), s)
        return o.loss(o.readout(x, self.head).flatten(0, -2), y.flatten())


def step(ops, d, layers, context, batch, compiled=False):
    "A training step: forward, backward, Adam"
    torch.manual_seed(0)
    model = Transformer(ops, d, layers, context)
    ids, opt = torch.randint(96, (batch, context)), torch.optim.Adam(model.parameters(), 1e-3, fused=True)
    run = torch.compile(model) if compiled else model
    def once():
        opt.zero_grad()
        run(ids, ids).backward()
        opt.step()
    return once


def rows(name, at_most, few={}, compiled=False, **size):
    "Ours and the peer's against plain"
    fns = {'plain': step(Plain, compiled=compiled, **size),
           'ours': step(Ours, compiled=compiled, **size)}
    if (p := peer()) and not compiled: fns['package'] = step(p, **size)
    t = medians(fns, **few)
    found = [ratio(f'{name}: unit-scaled / plain', t, 'ours', 'plain', at_most=at_most)]
    if 'package' in t:
        found += [ratio(f'{name}: package / plain', t, 'package', 'plain'),
                  ratio(f'{name}: package / ours', t, 'package', 'ours', at_least=1)]
    return found


SMALL, LARGE = dict(d=64, layers=2, context=64, batch=16), dict(d=128, layers=4, context=128, batch=16)


def bench_small():
    "d 64, 2 layers: where an op is short and Python's part of it long"
    return rows('d64, 2 layers', 1.25, dict(repeats=41), **SMALL)


def bench_large():
    "d 128, 4 layers"
    return rows('d128, 4 layers', 1.10, dict(repeats=15), **LARGE)


def bench_compiled():
    "The compiler fuses a factor into its neighbour"
    return (rows('d64, compiled', 1.05, dict(repeats=41), compiled=True, **SMALL)
            + rows('d128, compiled', 1.05, dict(repeats=15), compiled=True, **LARGE))


def bench_flops():
    "BERT-Large, a step over 512 tokens: multiplications by factors, in percent of those in matrix products (the authors: 0.2)"
    d, h, t, layers = 1024, 4096, 512, 24
    # forward, and twice that backward
    products = 3*layers*(t*(4*d*d + 2*d*h) + 2*t*t*d)
    # linear layers, gelu, attention, two weighted adds
    forward = t*(3*d + d + h + d) + t*h + t*d + 2*2*t*d
    # the same, and the weights' gradients
    backward = t*(3*d + d + h + d) + t*h + t*d + 2*2*t*d + 4*d*d + 2*d*h
    return [Row('BERT-Large, 512 tokens: factors / products',
                100*layers*(forward + backward)/products, at_most=.5, unit='%')]
