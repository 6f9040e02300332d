"""What does an FP32 copy that runs beside the model see of the faults of `sanitized_faults`? (chapter 18)

A hook keeps the output of each module, once in few bits and once with every cast to few bits left
out. A value is the largest difference of a step, divided by the spread of FP32's: of an output, of a
weight matrix's gradient, and of its update. A row `healthy: …` has the largest of four steps.
"""
import contextlib
from functools import partial
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from faulty_nets import FAULTS
from healthy_nets import NETS
from mpcourse.rounding import followers
from sanitized_faults import probed, step_of

ROWS = [*(f'fault: {name}' for name in FAULTS), *(f'healthy: {name}' for name in NETS)]
SEEDS = range(10)
FEW = torch.float16, torch.bfloat16
LARGEST = 1e9   # stands for what is not finite
CASTS = {torch.Tensor.half: torch.Tensor.float, torch.Tensor.bfloat16: torch.Tensor.float}


def wide(x):
    "A tensor of few bits, or its dtype, in FP32"
    if isinstance(x, torch.dtype): return torch.float32 if x in FEW else x
    if isinstance(x, torch.Tensor) and x.dtype in FEW: return x.float()
    return x


class InFP32(TorchFunctionMode):
    "Every tensor and every dtype of few bits becomes FP32"
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return CASTS.get(func, func)(*tree_map(wide, args), **tree_map(wide, kwargs or {}))


@contextlib.contextmanager
def without_casts(model):
    "The model in FP32, and nothing casts to fewer bits"
    def unrounded(f, x, *args, **kwargs): return x
    def no_autocast(*args, **kwargs): return contextlib.nullcontext()
    model.float()
    followers.append(unrounded)
    try:
        with patch('torch.autocast', no_autocast), InFP32(): yield
    finally: followers.remove(unrounded)


def seen(model, step, fp32):
    "Outputs in the order of the calls, gradients and updates of one step"
    outputs = []
    def look(m, args, out):
        if isinstance(out, torch.Tensor): outputs.append(out.detach().float().clone())
    for m in model.modules(): m.register_forward_hook(look)
    with without_casts(model) if fp32 else contextlib.nullcontext():
        matrices = [p for p in model.parameters() if p.dim() > 1]
        before = [p.detach().float().clone() for p in matrices]
        step()
    gradients = [p.grad.float().clone() for p in matrices if p.grad is not None]
    updates = [p.detach().float() - b for p, b in zip(matrices, before)]
    return dict(output=outputs, gradient=gradients, update=updates)


def error(low, ref):
    "Root mean square of the difference over the spread of the reference"
    if low.shape != ref.shape: return 0.    # another choice of experts
    if not low.isfinite().all(): return LARGEST
    spread = ref.double().std(correction=0).item() or ref.double().abs().max().item()
    if not spread: return 0.
    off = (low.double() - ref.double()).square().mean().sqrt().item()
    return min(off/spread, LARGEST)


def compared(few, exact):
    "The largest error of each kind"
    found = {}
    for kind, ref in exact.items():
        errors = [error(a, b) for a, b in zip(few[kind], ref)]
        found[kind] = max(errors, default=0.)
    return found


def fault(name, seed):
    "One step of a faulty net"
    both = []
    for fp32 in (False, True):
        torch.manual_seed(seed)
        both.append(seen(*FAULTS[name][1](seed), fp32))
    return compared(*both)


def healthy(name, seed):
    "The largest errors over four steps of a healthy net"
    largest = dict.fromkeys(('output', 'gradient', 'update'), 0.)
    for few, exact in zip(probed(name, seed), probed(name, seed)):
        both = []
        for step, fp32 in ((few, False), (exact, True)):
            torch.manual_seed(seed)
            both.append(seen(step[0], partial(step_of, *step), fp32))
        for kind, e in compared(*both).items(): largest[kind] = max(largest[kind], e)
    return largest


def run(row, seed):
    "One row"
    kind, _, name = row.partition(': ')
    return fault(name, seed) if kind == 'fault' else healthy(name, seed)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
