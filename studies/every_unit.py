"""Does a unit-scaled net need a scheme at all? Three nets in both forms, eight schemes, ten seeds
(chapter 33)

A row is a net, its form (`ordinary` or `unit-scaled`) and a scheme of `mpcourse.compare`. Each
form is compared with its own FP32. *text*: the pre-norm character model of
`studies/unit_sweep.py`; *sigmoids* and *CNN*: the nets of `studies/every_scheme.py`, converted by
`unit_scale`. Each form has the learning rate that is best in FP32 on three other seeds, or a
smaller one that is as good (`best_rate` finds it), and keeps it. A unit-scaled net is trained with
`unit_cross_entropy`; all are judged by the cross-entropy on new data.
"""
import torch

from mpcourse.compare import Training, train_scheme
from mpcourse.toys import batches, char_text, cross_entropy, deep_sigmoid, digits, evaluate, seeded, warmup_cosine
from mpcourse.unit import unit_cross_entropy
from mpcourse.unit_models import unit_param_groups, unit_scale
from mpcourse.zoo import cnn
from unit_sweep import CharModel

# data, an ordinary net, batch size, steps
NETS = {'text': (char_text, None, 16, 150), 'sigmoids': (digits, deep_sigmoid, 128, 600),
        'CNN': (digits, cnn, 64, 150)}
FORMS = 'ordinary', 'unit-scaled'
# log2 of the learning rate: the same for all weights of an ordinary net, of `unit_param_groups` for a unit-scaled one
RATES = {'text': (-6, -1), 'sigmoids': (-7, -3), 'CNN': (-6, 0)}
SCHEMES = ('FP32', 'BF16', 'FP16 scale 1', 'FP16 torch', 'BF16 weights', 'E4M3 no scale',
           'E4M3 per tensor',
           'NVFP4 readout in FP32')
ROWS = [f'{net}, {form}: {scheme}' for net in NETS for form in FORMS for scheme in SCHEMES
        # which refuses a convolution
        if not (net == 'CNN' and 'NVFP4' in scheme)]
SEEDS = range(10)


def model_of(net, unit, seed):
    "A net in one of its forms"
    if net != 'text':
        model = NETS[net][1](seed)
        return unit_scale(model,
                          readout=[n for n, _ in model.named_modules()][-1]) if unit else model
    with seeded(seed): return CharModel('pre-norm', unit)


def training(net, unit, seed, rate=None):
    "A net in one of its forms, with a learning rate of 2^rate"
    make, _, bs, steps = NETS[net]
    data, lr = make(), 2.**(RATES[net][unit] if rate is None else rate)
    model = model_of(net, unit, seed)
    groups = unit_param_groups(model, lr) if unit else [dict(params=model.parameters(), lr=lr)]
    rates = {p: g['lr'] for g in groups for p in g['params']}
    # a scheme may train a copy: it has the same order
    each = [rates[p] for p in model.parameters()]
    def opt(params): return torch.optim.Adam([dict(params=[p], lr=r) for p, r in zip(params, each)],
        betas=(.9, .99))
    return Training(model, opt, unit_cross_entropy if unit else cross_entropy,
                    lambda: batches(data, bs, steps, seed),
                    lambda m: evaluate(m, data)['loss'], warmup_cosine(steps, 20))


def best_rate(net, unit, exponents=range(-11, 2), seeds=range(100, 103)):
    "log2 of the smallest rate whose loss in FP32 is at most 1 % above the least"
    loss = {k: sum(train_scheme('FP32', training(net, unit, s, k), s)['score'] for s in seeds)
            for k in exponents}
    return min(k for k in loss if loss[k] <= 1.01*min(loss.values()))


def run(row, seed):
    "Score before and after the training, and the steps skipped"
    name, scheme = row.split(': ')
    net, form = name.rsplit(', ', 1)
    return train_scheme(scheme, training(net, form == 'unit-scaled', seed), seed)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
