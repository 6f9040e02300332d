"""Does the best learning rate of a narrow net fit a wide one? (chapter 26)

A transformer of one layer reads letters: 150 steps of 8 windows of 32, Adam, a warm-up and a
cosine. Biases stay at zero and the weights of norms at one, except in the two rules that name
them. A row is a rule for the rates and a width; its numbers are the losses on new text for a range
of rates. Controls have two widths, and so has an RNN. "As published" is u-μP's own rule:
embeddings get rate/√width, and the readout, which divides by its width instead of the root, gets
the rate itself. "Embeddings too": these get rate/width. "Larger weights": all initial matrices but
the embeddings are √3 times as large, as those of a unit-scaled net are in effect.
"""
from typing import NamedTuple

import torch, torch.nn.functional as F
from torch import nn

from mpcourse.toys import batches, char_text, seeded, warmup_cosine
from mpcourse.unit import unit_cross_entropy
from unit_sweep import CharModel

WIDTHS, SEEDS = (32, 64, 128, 256), range(8)


class Rule(NamedTuple):
    "Which rate a parameter gets: `lr` times a factor"
    unit: bool                # a net of unit-scaled ops
    exponents: range          # rates that are tried: 2^k
    power: float              # of the fan_in by which a matrix's rate is divided
    embedding: float = 1.     # factor for embeddings
    vector: float = 0.        # for biases and the weights of norms; zero: they stay as they are
    base: int = 1             # the width at which all rates are equal
    widths: tuple = WIDTHS
    kind: str = 'pre-norm'    # of model


def control(*args, **kw): return Rule(*args, **kw, widths=(32, 128))
def rnn(*args): return Rule(*args, widths=(32, 256), kind='RNN')


RULES = {
    'regular, one rate': Rule(False, range(-10, -3), 0.),
    'regular, rate/fan_in': Rule(False, range(-4, 2), 1.),
    'unit-scaled, one rate': Rule(True, range(-6, 0), 0.),
    'unit-scaled, rate/√fan_in': Rule(True, range(-3, 3), .5),
    'regular, one rate, embeddings × 8': Rule(False, range(-10, -3), 0., 8.),
    'regular, rate × 32/width': Rule(False, range(-8, -2), 1., base=32),
    'unit-scaled, one rate, embeddings × 8': control(True, range(-7, -1), 0., 8.),
    'unit-scaled, rate/√fan_in, embeddings / 8': control(True, range(-3, 3), .5, 1/8),
    'unit-scaled, as published': control(True, range(-3, 3), .5, 0.),
    'unit-scaled, rate/√fan_in, biases and norms at the rate': control(True, range(-3, 3), .5, 1., 1.),
    'unit-scaled, rate/√fan_in, biases and norms at rate/32': control(True, range(-3, 3), .5, 1., 1/32),
    'regular, rate/fan_in, embeddings too': control(False, range(-2, 1), 1.),
    'regular, one rate, embeddings × 8, larger weights': Rule(False, range(-8, -7), 0., 8., widths=(128,)),
    'RNN, regular, one rate': rnn(False, range(-10, -3), 0.),
    'RNN, regular, rate/fan_in': rnn(False, range(-4, 2), 1.),
    'RNN, regular, rate × 32/width': rnn(False, range(-8, -2), 1., 1., 0., 32),
    'RNN, unit-scaled, one rate': rnn(True, range(-7, -1), 0.),
    'RNN, unit-scaled, rate/√fan_in': rnn(True, range(-4, 2), .5)}
ROWS = [f'{name}: {d}' for name, rule in RULES.items() for d in rule.widths]


def factor(name, d, m, p):
    "What the rate is multiplied by for parameter p of module m"
    rule, published = RULES[name], 'published' in name
    if isinstance(m, nn.Embedding):
        if name.endswith('embeddings too'): return 1/d
        return d**-.5 if published else rule.embedding
    if p.dim() < 2: return rule.vector
    if published and len(p) == 96: return 1.                # the readout
    # relative to the base, all matrices shrink alike
    fan_in = d if rule.base > 1 else p.shape[1]
    return (rule.base/fan_in)**rule.power


def net(name, d, seed):
    "A fresh model"
    with seeded(seed):
        model = CharModel(RULES[name].kind, RULES[name].unit, d=d, layers=1, context=32)
    if 'published' in name: model.head.power = 1.
    for n, p in model.named_parameters():
        if n.endswith('bias'): nn.init.zeros_(p)
        p.requires_grad_(p.dim() > 1 or RULES[name].vector > 0)
        if name.endswith('larger weights') and p.dim() > 1 and n[:3] not in ('tok', 'pos'): p.data *= 3**.5
    return model


def groups(model, name, d, lr):
    "Adam's parameter groups"
    pairs = [(m, p) for m in model.modules() for p in m.parameters(recurse=False)
             if p.requires_grad]
    return [dict(params=[p], lr=lr*factor(name, d, m, p)) for m, p in pairs]


def train(name, d, lr, seed, groups=groups, steps=150):
    "Loss on new text"
    model, data, unit = net(name, d, seed), char_text(32), RULES[name].unit
    opt = torch.optim.Adam(groups(model, name, d, lr), betas=(.9, .99), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, warmup_cosine(steps, 20))
    for x, y in batches(data, 8, steps, seed):
        z = model(x)
        loss = unit_cross_entropy(z, y) if unit else F.cross_entropy(z.flatten(0, 1), y.flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        schedule.step()
    x, y = [t[::5] for t in data.valid]
    with torch.no_grad(): return F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item()


def run(row, seed):
    "Loss on new text, rate by rate"
    name, d = row.split(': ')
    return {f'2^{k}': train(name, int(d), 2.**k, seed) for k in RULES[name].exponents}


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
