"""What the instruments cost on a model of 134 million weights: in training steps of it, and gigabytes of the process's peak.

SmolLM2-135M reads 128 tokens with two threads; a training step is a forward and a backward pass in FP32, without an optimizer."""
import resource, time

import torch
from harness import alone, Row
from mpcourse.advise import advise_schemes
from mpcourse.fp8 import simulate_fp8
from mpcourse.real import load_smollm2, read_texts, text_loss
from mpcourse.sanitizer import sanitize
from mpcourse.underflow import probe_flushed


def step(model, ids):
    text_loss(model(ids), ids).backward()
    model.zero_grad()

def watched(model, ids):
    with sanitize(), torch.autocast('cpu', torch.bfloat16): step(model, ids)

def flushed(model, ids): probe_flushed(model, (ids, ids), text_loss)

def in_fp8(model, ids): step(simulate_fp8(model, 'tensorwise', keep='lm_head'), ids)

def advised(model, ids):
    opt = torch.optim.AdamW(model.parameters(), lr=1e-5)
    advise_schemes(model, opt, text_loss, [(ids, ids)]*4, steps=4)

JOBS = {'a training step': step, 'sanitize, BF16': watched, 'probe_flushed, FP16': flushed,
        'advise_schemes, four steps': advised, "a step under simulate_fp8('tensorwise')": in_fp8}


def measured(job, pipe):
    "Seconds of a step and of the job, and the process's peak"
    torch.set_num_threads(2)
    model, tokenizer = load_smollm2()
    ids = read_texts(tokenizer)[:1]
    step(model, ids)
    times = []
    for some in (step, job):
        start = time.perf_counter()
        some(model, ids)
        times.append(time.perf_counter() - start)
    pipe.send((*times, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss/2**20))


def bench_real():
    "Time and peak memory of each instrument, in a process of its own"
    rows = []
    for name, job in JOBS.items():
        plain, seconds, peak = alone(measured, job)
        rows.append(Row(f'{name}, in steps', seconds/plain, ms=dict(step=round(plain*1e3))))
        rows.append(Row(f'{name}, peak', peak, unit='GB'))
    return rows
