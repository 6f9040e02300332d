"""How often is `sanitize` right, and what do the alternatives see? (chapter 18)

A row `fault: …` is one step of a net of `faulty_nets`: did each tool name anything, and is the first
finding of `sanitize` that follows from no other on the `right line`, or made there? A row
`healthy: …` is a net of `healthy_nets` at its start and after forty steps, in BF16 and in FP16 with a
loss scale: how many of these `probes` are `accused`? Two rows train the integrator.
"""
import contextlib, copy, io, warnings

import torch
from torch.utils._pytree import tree_map

from faulty_nets import FAULTS, losses
from healthy_nets import NETS
from mpcourse.sanitizer import sanitize
from mpcourse.shadows import code_at

SCALES = {torch.bfloat16: 1., torch.float16: 2.**12}
TRAINED = {'losses: integrator in FP32': torch.float32, 'losses: integrator in BF16': torch.bfloat16}
ROWS = [*(f'fault: {name}' for name in FAULTS), *(f'healthy: {name}' for name in NETS), *TRAINED]
SEEDS = range(10)


def anomaly(model, step):
    "Does torch's anomaly mode raise an error?"
    try:
        with warnings.catch_warnings(action='ignore'), torch.autograd.detect_anomaly(): step()
    except RuntimeError as e: return 'nan' in str(e)
    return False


def debugged(model, step):
    "Does Hugging Face's class raise an error?"
    from transformers.debug_utils import DebugUnderflowOverflow
    DebugUnderflowOverflow(model)
    try:
        with contextlib.redirect_stdout(io.StringIO()): step()
    except ValueError as e: return 'inf/nan' in str(e)
    return False


def hooked(model, step):
    "Is an output of a module not finite?"
    seen = []
    def look(m, args, out): seen.append(isinstance(out, torch.Tensor) and not out.isfinite().all())
    for m in model.modules(): m.register_forward_hook(look)
    step()
    return any(seen)


ALTERNATIVES = {'detect_anomaly': anomaly, 'Hugging Face': debugged, 'hook for inf': hooked}


def fault(name, seed):
    "What each tool says of a step"
    line, make = FAULTS[name]
    def again():
        torch.manual_seed(seed)
        return make(seed)
    _, step = again()
    with sanitize() as report: step()
    found = report.worst
    value = {'sanitize': found is not None, 'right line': False}
    if found is not None:
        codes = [code_at(at[1]) for at in (found.source, found.shows) if at]
        value['right line'] = any(line in code for code in (found.code, *codes))
    return value | {tool: f(*again()) for tool, f in ALTERNATIVES.items()}


def step_of(model, x, y, loss_func, opt, dtype):
    "A step under autocast; in FP16 with a loss scale, and only its gradients"
    with torch.autocast('cpu', dtype): pred = model(x)
    pred = tree_map(lambda t: t.float(), pred)
    (loss_func(pred, y)*SCALES[dtype]).backward()
    if dtype == torch.bfloat16: opt.step()


def probed(name, seed):
    "Four times, for BF16 and FP16 at the start and after forty steps: what `step_of` takes, on a copy"
    make, data, loss_func = NETS[name]
    torch.manual_seed(seed)
    model = make()
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    for steps in (0, 40):
        for k in range(steps):
            x, y = data(1000*seed + k)
            opt.zero_grad()
            loss_func(model(x), y).backward()
            opt.step()
        opt.zero_grad()
        for dtype in SCALES:
            twin, its_opt = copy.deepcopy((model, opt))
            yield twin, *data(1000*seed + 999), loss_func, its_opt, dtype


def healthy(name, seed):
    "How many of four steps of a net are accused"
    accused, probes = 0, 0
    for step in probed(name, seed):
        with sanitize() as report: step_of(*step)
        accused += bool(report.findings)
        probes += 1
    return dict(accused=accused, probes=probes)


def run(row, seed):
    "One row"
    if row in TRAINED:
        _, loss = losses(seed, TRAINED[row])
        return dict(last=sum(loss[-20:])/20, early=sum(loss[10:20])/10)
    kind, _, name = row.partition(': ')
    return fault(name, seed) if kind == 'fault' else healthy(name, seed)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
