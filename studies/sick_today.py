"""Which remedies cure three sick trainings of today? As in `sick_trainings`; the solutions of an
exercise stand here (chapter 35)

H, I and J have no zero and no infinity that a log would show. Rows, remedies and numbers are those
of `sick_trainings`.
"""
from functools import partial

import torch
from torch import nn

from mpcourse.cases import REMEDIES
from mpcourse.compare import measured_scale
from mpcourse.dynamic import DynamicScaler
from mpcourse.step import MixedStep
from mpcourse.toys import relu_mlp, seeded
from sick_trainings import Patient, classify, common, judged


def bf16(t): return MixedStep(dtype='bf16')

STEPS = common() | {'nothing': bf16, 'own': bf16,
                    'measured': lambda t: MixedStep(measured_scale(t)),
                    'start 2^24': lambda t: MixedStep(DynamicScaler(2.**24))}


# --- logits that share 3,000 (2,000 does no harm on the digits) ---

def offset(seed, repaired):
    model = relu_mlp(seed)
    if not repaired: nn.init.constant_(model[-1].bias, 3000.)
    return classify(model, partial(torch.optim.Adam, lr=1e-3), 64, 300, seed)


# --- Adam whose second moment is stored in linear INT8 ---

def int8(t, size=64):
    "Blocks with one scale each"
    blocks = nn.functional.pad(t.flatten(), (0, -t.numel() % size)).view(-1, size)
    scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-30)/127
    return ((blocks/scale).round()*scale).flatten()[:t.numel()].view_as(t)


class Int8Adam(torch.optim.Optimizer):
    "Adam that keeps its second moment in eight bits"
    def __init__(self, params, lr, eps): super().__init__(params, dict(lr=lr, eps=eps))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group['params']:
                if p.grad is None: continue
                s = self.state[p]
                if not s: s.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                s['t'] += 1
                g = p.grad.float()
                s['m'] = .9*s['m'] + .1*g
                v = .999*s['v'] + .001*g**2
                update = s['m']/(1 - .9**s['t'])/((v/(1 - .999**s['t'])).sqrt() + group['eps'])
                p -= group['lr']*update
                s['v'] = int8(v)


def states(seed, repaired):
    return classify(relu_mlp(seed), partial(Int8Adam, lr=1e-3, eps=1e-4 if repaired else 1e-8), 64,
                    300, seed)


# --- a variance in one pass ---

class Normalized(nn.Module):
    "Mean 0 and variance 1 for each picture"
    def __init__(self, two_passes):
        super().__init__()
        self.two_passes = two_passes

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        if self.two_passes: variance = (x - mean).square().mean(-1, keepdim=True)
        else: variance = (x*x).mean(-1, keepdim=True) - mean*mean
        return (x - mean)*(variance.clamp(min=0) + 1e-5).rsqrt()


def one_pass(seed, repaired):
    with seeded(seed):
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), Normalized(repaired), nn.ReLU(),
                              nn.Linear(64, 10))
    nn.init.constant_(model[1].bias, 8.)
    return classify(model, partial(torch.optim.Adam, lr=1e-3), 64, 200, seed)


NOTES = dict(
    H="All logits share 3,000. Softmax does not see it, but the logits are stored in BF16, whose numbers are 16 apart there, so most "
      "differences are lost. FP16's are 2 apart, and it trains; so does FP32. Take the common part out of the head before "
      "the rounding (chapter 30); `probe_precision` calls it a large offset.",
    I="The optimizer keeps Adam's second moment in INT8, in blocks with one scale: what is below 1/254 of its block's largest becomes zero, and "
      "the step is divided by epsilon alone. No format of the model helps. A larger epsilon is the cheapest cure; a code whose steps shrink "
      "with the number is the better one (chapter 29). The probe does not see it, since it takes FP32 states.",
    J="A variance is computed as the mean of squares minus the square of the mean. The mean is 8, so in 16 bits nothing is left of the "
      "difference, and a clamp at zero hides that it was negative. Subtract the mean first (chapter 30); `probe_precision` names the "
      "mean, a large offset, or the difference, a cancellation.")
PATIENTS = dict(
    H=Patient(offset, STEPS, 'offset', 'centre', NOTES['H']),
    I=Patient(states, STEPS, 'epsilon', 'larger epsilon', NOTES['I']),
    J=Patient(one_pass, STEPS, 'cancellation', 'two passes', NOTES['J']))
ROWS = [f'{name}: {remedy}' for name in PATIENTS for remedy in ('nothing', *REMEDIES, 'own')]
SEEDS = range(10)


def run(row, seed):
    "As in `sick_trainings`"
    return judged(PATIENTS, row, seed)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
