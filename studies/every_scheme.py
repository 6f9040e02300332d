"""Which scheme trains which net as FP32 does? Nine nets, twenty schemes, ten seeds (chapter 33)

A row is a net and a scheme of `mpcourse.compare`, on quiet data: no bad batch. *half a million
tokens*: the loss of the net on text is divided by 512, as a mean over so many micro-batches
divides it, and Adam's epsilon with it, so that FP32 trains as before. *Xavier*: the initialization
that `studies/sigmoid_init.py` tried. The score is the loss on new data, for the two heads the
error of the drawing; NaN where a scheme refuses the net. `FP32 rounded once` is FP32 from weights
that are rounded to FP16 before the first step. Four bits, the slowest to emulate, are tried on six
nets.
"""
import math
from functools import partial

import torch, torch.nn.functional as F
from torch import nn

import mpcourse.zoo  # noqa: F401
from mpcourse.compare import SCHEMES, Training, toy_training, train_scheme
from mpcourse.toys import batches, char_text, cross_entropy, drawings, evaluate, heads_loss, heads_score, mlp, seeded, two_heads
from sigmoid_init import initialise

Adam = torch.optim.Adam


def million(seed, parts=512):
    "The net on text, as one of many micro-batches"
    t = toy_training('char_lm', seed, 100)
    own, t.opt = t.loss_func, partial(t.opt, eps=1e-8/parts)
    t.loss_func = lambda pred, y: own(pred, y)/parts
    return t


def xavier(seed):
    "The deep sigmoid net, initialized sensibly"
    t = toy_training('deep_sigmoid', seed, 300)
    initialise(t.model, seed, False)
    return t


def heads(seed):
    "The net that reads a digit and draws it, judged by the drawing"
    data = drawings()
    return Training(two_heads(seed), partial(Adam, lr=3e-3), heads_loss,
                    lambda: batches(data, 256, 150, seed),
                    lambda model: heads_score(model, data)[1])


class Recurrent(nn.Module):
    "An LSTM on text"
    def __init__(self, d=64):
        super().__init__()
        self.emb, self.lstm, self.head = nn.Embedding(96, d), nn.LSTM(d, d, batch_first=True), nn.Linear(d, 96)

    def forward(self, x): return self.head(self.lstm(self.emb(x))[0])


def recurrent(seed):
    "The next symbol of English text"
    data = char_text(64)
    with seeded(seed): model = Recurrent()
    return Training(model, partial(Adam, lr=5e-3), cross_entropy,
                    lambda: batches(data, 16, 150, seed),
                    lambda model: evaluate(model, data)['loss'])


def summed(seed, n=4096):
    "A function of 16 numbers, with values near ten and a loss that is summed over the batch, not averaged"
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(2*n, 16, generator=gen)
    y = 10*torch.tanh(x @ torch.randn(16, 4, generator=gen)/4) @ torch.randn(4, 1, generator=gen)
    def drawn():
        gen = torch.Generator().manual_seed(seed)
        for _ in range(300):
            rows = torch.randint(n, (256,), generator=gen)
            yield x[rows], y[rows]
    def score(model): return F.mse_loss(model(x[n:]), y[n:]).item()
    return Training(mlp([16, 128, 128, 1], seed=seed), partial(Adam, lr=3e-3),
                    partial(F.mse_loss, reduction='sum'), drawn, score)


NETS = {'text': lambda seed: toy_training('char_lm', seed, 100),
        'text, half a million tokens': million,
        'two heads': heads, 'CNN': lambda seed: toy_training('cnn', seed), 'two towers': lambda seed: toy_training('two_towers', seed, 300),
        'sigmoids': lambda seed: toy_training('deep_sigmoid', seed), 'sigmoids, Xavier': xavier, 'LSTM': recurrent, 'summed loss': summed}
SLOW = 'text, half a million tokens', 'sigmoids', 'sigmoids, Xavier'           # no four bits there
ROWS = [f'{net}: {scheme}' for net in NETS for scheme in SCHEMES
        if not (net in SLOW and 'NVFP4' in scheme)]
SEEDS = range(10)


def attempted(nets, row, seed):
    "One net under one scheme; NaN where the scheme refuses the net"
    net, scheme = row.split(': ')
    try: return train_scheme(scheme, nets[net](seed), seed)
    except ValueError as e:
        if 'not converted' not in str(e) and 'no tiles' not in str(e): raise
        return dict(before=math.nan, score=math.nan, skipped=0)


def run(row, seed):
    "Score before and after the training, and the steps skipped"
    return attempted(NETS, row, seed)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
