"""Do regular and unit-scaled character models train in FP16? (chapter 26)

A row is a kind of model, its form (regular, with a loss scale of 2^11, with the unit-scaled loss alone,
unit-scaled) and a case: FP32; FP16 with weights and Adam in FP32; the same with a loss divided by 1,024;
all in FP16. A training has 150 steps of 16 windows of 32 characters; what FP16 flushes is counted in the
last five, on two copies of the model, in FP32 and in FP16. (The stored shares were counted operation by operation, on the
operands that were there. Two copies count more in the regular RNN: a tanh that FP16 rounds to 1 has a derivative of zero at
every scale, so 15 to 20 % of its activations' gradients are zero that were stored as 0 to 5 %. The rest agrees.)
"""
import copy
from collections import defaultdict

import torch

from mpcourse.monitor import TensorHooks
from mpcourse.tensorcore import fast_half
from mpcourse.toys import batches, char_text, cross_entropy, fit, half_pass, plain_step, seeded, warmup_cosine
from mpcourse.underflow import count_zeros
from mpcourse.unit import unit_cross_entropy
from mpcourse.unit_models import KINDS_OF_MODEL, CharModel

# learning rates of the regular and of the unit-scaled form, chosen in FP32 and kept in FP16
RATES = {'pre-norm': (.01, .05), 'post-norm': (.01, .03), 'convolution': (.01, .1), 'RNN': (.03, .1)}
# model unit-scaled or not, `unit_cross_entropy` or the mean cross-entropy, and a loss scale
FORMS = {'regular': (False, False, 1.), 'regular × 2^11': (False, False, 2.**11),
         'regular, unit loss': (False, True, 1.), 'unit-scaled': (True, True, 1.)}
# a factor on the loss, None for FP32; and Adam's epsilon where weights, gradients and moments are all FP16
CASES = {'FP32': (None, None), 'FP16': (1., None), 'FP16, long mean': (2.**-10, None),
         'all FP16, ε 1e-7': (1., 1e-7), 'all FP16, ε 1e-6': (1., 1e-6)}


def makes_sense(form, case):
    "In FP32 no scale matters, and `unit_cross_entropy` does not know how long its mean is"
    if case == 'FP32': return form in ('regular', 'unit-scaled')
    return 'long' not in case or not FORMS[form][1]


PAIRS = {f'{form} in {case}': (*FORMS[form], *CASES[case]) for case in CASES for form in FORMS
         if makes_sense(form, case)}
ROWS = [f'{kind}: {pair}' for kind in KINDS_OF_MODEL for pair in PAIRS]
SEEDS = range(3)


def all_half(scale):
    "A step in which everything but the loss is in FP16; Adam takes the gradients with their scale"
    @fast_half()
    def step(model, xb, yb, opt, loss_func):
        loss = loss_func(model(xb).float(), yb)
        opt.zero_grad()
        (loss*scale).backward()
        opt.step()
        return loss.detach()
    return step


def gradients(model, xb, yb, loss_func, dtype, scale):
    "Gradients of a copy of the model by (name, kind), one for each call of a layer"
    twin, found = copy.deepcopy(model).float(), defaultdict(list)
    def see(name, kind, g): found[name, kind].append(g)
    opt = torch.optim.SGD(twin.parameters(), lr=0.)
    with TensorHooks(twin, see, ('weight_grad', 'activation_grad')): half_pass(dtype, scale)(twin, xb, yb, opt, loss_func)
    return found


def counting(step, start, found, scale=1.):
    "The step; from call number `start` on it adds to `found` the zeros in each kind of gradient"
    calls = []
    def counted(model, xb, yb, opt, loss_func):
        calls.append(1)
        if len(calls) > start:
            with fast_half():
                high, low = (gradients(model, xb, yb, loss_func, d, scale) for d in (torch.float32, torch.float16))
            for key, after in low.items():
                first, *more = map(count_zeros, high[key], after)
                kind, z = key[1], sum(more, first)
                found[kind] = found[kind] + z if kind in found else z
        return step(model, xb, yb, opt, loss_func)
    return counted


def train(kind, unit, unit_loss, scale, factor, eps, seed, steps=150):
    "Final loss, and flushed shares of the gradients; all NaN if the loss is. The options are those of `PAIRS`"
    with seeded(seed): model = CharModel(kind, unit, context=32)
    if eps: model.half()
    opt, found = torch.optim.Adam(model.parameters(), RATES[kind][unit], (.9, .99), eps or 1e-8), {}
    if factor is None: step = plain_step
    else:   # where Adam is in FP32, both factors are taken out of its gradients
        half = all_half(scale*factor) if eps else fast_half()(half_pass(torch.float16, scale*factor))
        step = counting(half, steps - 5, found, scale*factor)
    hist = fit(model, batches(char_text(32), 16, steps, seed), opt,
               unit_cross_entropy if unit_loss else cross_entropy, step, warmup_cosine(steps, 20))
    loss = sum(hist['loss'][-20:])/20
    shares = {k: found[k].share.item() if k in found else 0. for k in ('weight_grad', 'activation_grad')}
    return dict(loss=loss) | {k: v if loss == loss else loss for k, v in shares.items()}


def run(row, seed):
    "Final loss, flushed shares of the weights' and of the activations' gradients"
    kind, pair = row.split(': ')
    return train(kind, *PAIRS[pair], seed)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
