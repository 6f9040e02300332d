"""Do regular and unit-scaled character models train in FP16? (chapter 26)

A row is a kind of model, its form (regular, with a loss scale of 2^11, with the unit-scaled loss
alone, unit-scaled) and a case: FP32; FP16 with weights and Adam in FP32; the same with a loss
divided by 1,024; all in FP16. A training has 150 steps of 16 windows of 32 characters; what FP16
flushes is counted in the last five, on two copies of the model, in FP32 and in FP16. (The stored
shares were counted operation by operation, on the operands that were there. Two copies count more
in the regular RNN: a tanh that FP16 rounds to 1 has a derivative of zero at every scale, so 15 to
20 % of its activations' gradients are zero that were stored as 0 to 5 %. The rest agrees.)
"""
import copy
from collections import defaultdict

import torch, torch.nn.functional as F
from torch import nn

from mpcourse.monitor import TensorHooks
from mpcourse.tensorcore import fp32_accumulate
from mpcourse.toys import batches, char_text, cross_entropy, fit, half_pass, plain_step, seeded, warmup_cosine
from mpcourse.underflow import count_zeros
from mpcourse.unit import running_tau, scaled, unit_cross_entropy, unit_linear, unit_tanh, weighted_add
from mpcourse.unit_models import UNIT_LAYERS, UnitAttention, UnitReadout, UnitResidual

KINDS_OF_MODEL = ('pre-norm', 'post-norm', 'convolution', 'RNN')
# learning rates of the regular and of the unit-scaled form, chosen in FP32 and kept in FP16
RATES = {'pre-norm': (.01, .05), 'post-norm': (.01, .03), 'convolution': (.01, .1),
         'RNN': (.03, .1)}
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


# --- the models ---

class UnitRNN(nn.Module):
    "h = tanh of the weighted sum of W x and U h, step by step; unit-scaled"
    unit_scaled, power = True, .5
    def __init__(self,
        d_in:int, # features of the input
        d:int, # features of the state
        share:float=.5, # the input's share of the variance of the sum, between 0 and 1
    ):
        super().__init__()
        self.w, self.u = nn.Parameter(torch.randn(d, d_in)), nn.Parameter(torch.randn(d, d))
        self.b, self.weights = nn.Parameter(torch.zeros(d)), (share**.5, (1 - share)**.5)

    def forward(self, x, h=None):
        "(N, T, d_in) to all states (N, T, d)"
        x, u, states = unit_linear(x, self.w, self.b), scaled(self.u, 1., x.shape[1]**-.5), []
        for xt in x.unbind(1):
            s = xt if h is None else weighted_add(xt, unit_linear(h, u), weights=self.weights)
            h = unit_tanh(s)
            states.append(h)
        return torch.stack(states, 1)


class Ops:
    "The layers of a model: torch's or ours"
    def __init__(self, unit):
        self.unit = unit
        layers = nn.Linear, nn.Embedding, nn.LayerNorm, nn.GELU, nn.Conv1d
        self.linear, self.embedding, self.norm, self.gelu, self.conv = [UNIT_LAYERS[c] if unit else c for c in layers]
        self.readout = UnitReadout if unit else nn.Linear


class Attention(nn.Module):
    "What `UnitAttention` is the unit-scaled form of"
    def __init__(self, d, heads):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(d, 3*d), nn.Linear(d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d//self.heads).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))


class CausalConv(nn.Module):
    "A convolution over what is at a place and before it, and a linear layer"
    def __init__(self, o, d, kernel=7):
        super().__init__()
        self.conv, self.act, self.out = o.conv(d, 2*d, kernel), o.gelu(), o.linear(2*d, d)

    def forward(self, x):
        past = F.pad(x.transpose(1, 2), (self.conv.kernel_size[0] - 1, 0))
        return self.out(self.act(self.conv(past)).transpose(1, 2))


class RNN(nn.Module):
    "What `UnitRNN` is the unit-scaled form of"
    def __init__(self, d):
        super().__init__()
        self.inp, self.rec = nn.Linear(d, d), nn.Linear(d, d, bias=False)

    def forward(self, x):
        x, h, states = self.inp(x), 0., []
        for xt in x.unbind(1):
            h = torch.tanh(xt + (self.rec(h) if states else 0.))
            states.append(h)
        return torch.stack(states, 1)


class Residual(nn.Module):
    "What `UnitResidual` is the unit-scaled form of: a plain sum"
    def __init__(self, f, norm, tau, post):
        super().__init__()
        self.f, self.norm, self.post = f, norm, post

    def forward(self, x): return self.norm(x + self.f(x)) if self.post else x + self.f(self.norm(x))


class CharModel(nn.Module):
    "A character model of some kind, regular or unit-scaled: symbols (N, T) to logits (N, T, n_out)"
    def __init__(self,
        kind:str='pre-norm', # one of `KINDS_OF_MODEL`
        unit:bool=True, # unit-scaled
        n_out:int=96, # symbols
        d:int=64, # features
        layers:int=2, # of two branches each
        context:int=64, # longest window
    ):
        super().__init__()
        o, self.unit = Ops(unit), unit
        self.tok, self.pos = o.embedding(n_out, d), o.embedding(context, d)
        self.body = nn.Sequential(*branches(kind, o, d, layers, context))
        self.ln, self.head = nn.Identity() if kind == 'post-norm' else o.norm(d), o.readout(d, n_out)

    def forward(self, ids):
        "integers (N, T) to (N, T, n_out)"
        tok, pos = self.tok(ids), self.pos(torch.arange(ids.shape[1], device=ids.device))
        # the places' gradient is a sum over the batch, and their edge is cut
        x = weighted_add(tok, scaled(pos, 1., len(ids)**-.5)) if self.unit else tok + pos
        return self.head(self.ln(self.body(x)))


def branches(kind, o, d, layers, context):
    "The residual branches of a character model; the RNN has one layer and none"
    if kind == 'RNN': return [UnitRNN(d, d) if o.unit else RNN(d)]
    def ffn(): return nn.Sequential(o.linear(d, 4*d), o.gelu(), o.linear(4*d, d))
    def mix():
        if kind == 'convolution': return CausalConv(o, d)
        return UnitAttention(d, context=context) if o.unit else Attention(d, 2)
    fs = [f() for _ in range(layers) for f in (mix, ffn)]
    taus = [running_tau(i + 1) if o.unit else None for i in range(len(fs))]
    block = UnitResidual if o.unit else Residual
    return [block(f, o.norm(d), tau, kind == 'post-norm') for f,tau in zip(fs, taus)]


# --- the trainings ---

def all_half(scale):
    "A step in which everything but the loss is in FP16; Adam takes the gradients with their scale"
    @fp32_accumulate()
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
    with TensorHooks(twin, see, ('weight_grad', 'activation_grad')):
        half_pass(dtype, scale)(twin, xb, yb, opt, loss_func)
    return found


def counting(step, start, found, scale=1.):
    "The step; from call number `start` on it adds to `found` the zeros in each kind of gradient"
    calls = []
    def counted(model, xb, yb, opt, loss_func):
        calls.append(1)
        if len(calls) > start:
            with fp32_accumulate():
                high, low = (gradients(model, xb, yb, loss_func, d, scale)
                             for d in (torch.float32, torch.float16))
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
        half = all_half(scale*factor) if eps else fp32_accumulate()(half_pass(torch.float16, scale*factor))
        step = counting(half, steps - 5, found, scale*factor)
    hist = fit(model, batches(char_text(32), 16, steps, seed), opt,
               unit_cross_entropy if unit_loss else cross_entropy, step, warmup_cosine(steps, 20))
    loss = sum(hist['loss'][-20:])/20
    shares = {k: found[k].share.item() if k in found else 0.
              for k in ('weight_grad', 'activation_grad')}
    return dict(loss=loss) | {k: v if loss == loss else loss for k, v in shares.items()}


def run(row, seed):
    "Final loss, flushed shares of the weights' and of the activations' gradients"
    kind, pair = row.split(': ')
    return train(kind, *PAIRS[pair], seed)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
