"""What `sanitize` costs: a watched training step in steps that are not watched, its peak memory, and a step that it only waits in.

The model is a GPT under BF16's autocast with AdamW. Memory is the process's peak (`ru_maxrss`), imports included, with and
without the watched step."""
import resource, time
from statistics import median

import torch
from harness import alone, Row
from mpcourse.sanitizer import sanitize
from mpcourse.toys import CharTransformer, cross_entropy, seeded

SIZES = {'the toy, 117 thousand parameters': ({}, 16, 64, 5),
         '25 million parameters': (dict(d=512, layers=8, heads=8), 2, 64, 3)}


def setting(kw, bs, context):
    with seeded(0): model = CharTransformer(**kw)
    x = torch.randint(96, (bs, context), generator=torch.Generator().manual_seed(0))
    opt = torch.optim.AdamW(model.parameters(), 1e-4)
    def step():
        with torch.autocast('cpu', torch.bfloat16): pred = model(x)
        opt.zero_grad()
        cross_entropy(pred.float(), x).backward()
        opt.step()
    step()                                  # makes the optimizer's state
    return model, step


def plain(step): step()

def watched(step):
    with sanitize(): step()

def waited(step):
    with sanitize(steps=[]): step()


def measured(job, kw, bs, context, repeats, pipe):
    "Seconds of the median run, and by how much the process's peak grew beyond that of a step"
    torch.set_num_threads(1)
    model, step = setting(kw, bs, context)
    weights = sum(p.nbytes for p in model.parameters())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss*1024
    job(step)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss*1024/peak
    times = []
    for _ in range(repeats):
        start = time.process_time()
        job(step)
        times.append(time.process_time() - start)
    pipe.send((median(times), grown, weights))


def bench_sanitizer():
    "Time and memory of a watched step"
    rows = []
    for name, args in SIZES.items():
        (step, _, weights), (watch, grown, _), (wait, _, _) = (alone(measured, job, *args) for job in (plain, watched, waited))
        large = weights > 5e7
        ms = dict(step=round(step*1e3), watched=round(watch*1e3), waited=round(wait*1e3))
        rows.append(Row(f'{name}: a watched step in steps', watch/step, at_most=6 if large else None, ms=ms))
        rows.append(Row(f'{name}: a step that is only waited in', wait/step, at_most=1.2 if large else None))
        if large:       # weights, gradients and two moments are there anyway
            rows.append(Row(f'{name}: memory of a watched step over that of a step', grown, at_most=2.2))
    return rows
