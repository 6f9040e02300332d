"""What `probe_precision` costs: its time in FP32 training steps, and its peak memory beside that of the weights and of one step.

The model is a GPT; the reference is a step of torch's own FP32 with SGD on the same batch. Memory is the growth of the process's peak
(`ru_maxrss`), each taken in a process of its own."""
import multiprocessing as mp
import resource, time
from statistics import median

import torch
from harness import Row
from mpcourse.sanitizer import probe_precision
from mpcourse.toys import CharTransformer, cross_entropy, seeded

SIZES = {'the toy, 117 thousand parameters': ({}, 16, 64, 5),
         '160 million parameters': (dict(d=1024, layers=12, heads=16), 2, 64, 1)}


def setting(kw, bs, context):
    with seeded(0): model = CharTransformer(**kw)
    x = torch.randint(96, (bs, context), generator=torch.Generator().manual_seed(0))
    return model, (x, x)


def fp32_step(model, batch):
    opt = torch.optim.SGD(model.parameters(), lr=.1)
    opt.zero_grad()
    cross_entropy(model(batch[0]), batch[1]).backward()
    opt.step()


def probe_step(model, batch): probe_precision(model, batch, cross_entropy, 'bf16')


def measured(job, kw, bs, context, repeats, pipe):
    "Seconds of the median run, and how many bytes the process's peak grew beyond the model"
    torch.set_num_threads(1)
    model, batch = setting(kw, bs, context)
    weights = sum(p.nbytes for p in model.parameters())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss*1024
    job(model, batch)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss*1024 - before
    times = []
    for _ in range(repeats):
        start = time.process_time()
        job(model, batch)
        times.append(time.process_time() - start)
    pipe.send((median(times), grown, weights))


def alone(job, *args):
    here, there = mp.Pipe()
    p = mp.get_context('spawn').Process(target=measured, args=(job, *args, there))
    p.start()
    p.join()
    return here.recv()


def bench_probe():
    "Time and memory of a probe in BF16's autocast"
    rows = []
    for name, (kw, bs, context, repeats) in SIZES.items():
        step, step_memory, weights = alone(fp32_step, kw, bs, context, repeats)
        probe, memory, _ = alone(probe_step, kw, bs, context, repeats)
        large = weights > 1e8
        rows.append(Row(f'{name}: time of a probe in FP32 steps', probe/step,
                        at_most=6 if large else None,
                        ms=dict(step=round(step*1e3), probe=round(probe*1e3))))
        # a small model drowns in what the process needs anyway
        if large:
            rows.append(Row(f'{name}: memory of a probe over that of weights and a step',
                            (weights + memory)/(weights + step_memory), at_most=2.5))
    return rows
