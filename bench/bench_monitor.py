"""What watching costs: a collection every 10 steps as a share of the training step.

The step is the character transformer's in mixed precision: forward, backward and Adam (`MixedStep`; on a CPU within `fast_half`). A collection is timed as a step that
collects minus one that does not; hooks that look away are timed against a model without any. The small transformer of the course has a step so short that on a CPU a collection of
everything costs half of one: judged are all gradients, 2^14 elements of each larger tensor. In a wider one, everything in full is judged. The rest is there to be read."""
import gc, tracemalloc

import torch
from harness import Row, medians
from mpcourse.monitor import TensorCollector
from mpcourse.scaler import StaticScaler
from mpcourse.step import MixedStep
from mpcourse.toys import CharTransformer, cross_entropy, plain_step, seeded

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
EVERY, LIMIT = 10, .02 if DEVICE == 'cuda' else .03
GRADS, SAMPLE = dict(kinds=('weight_grad', 'activation_grad')), dict(sample=2**14)
FULL = LIMIT if DEVICE == 'cuda' else None


def wait():
    if DEVICE == 'cuda': torch.cuda.synchronize()


def setting(mixed=True, watched=None, watch={}, **kw):
    "A step of the character transformer; watched: are steps collected? None: there is no collector"
    with seeded(0): model = CharTransformer(**kw).to(DEVICE)
    opt, scaler = torch.optim.Adam(model.parameters(), lr=1e-3), StaticScaler(1024.).to(DEVICE)
    step = MixedStep(scaler) if mixed else plain_step
    x = torch.randint(96, (16, 64), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    c = None if watched is None else TensorCollector(model, schedule=lambda n: watched, opt=opt, scaler=scaler if mixed else None, keep=10, **watch)
    def run():
        out = step(model, x, x, opt, cross_entropy)
        if c is not None: c.step(out['loss'] if mixed else out)
        wait()
    return run


def cost(name, kinds, repeats=31, **kw):
    "Costs of collections, spread over the steps until the next; kinds: name -> (arguments of the collector, bound)"
    fns = {'bare': setting(**kw), 'idle': setting(watched=False, **kw), **{k: setting(watched=True, watch=w, **kw) for k,(w,_) in kinds.items()}}
    t = medians(fns, repeats)
    def row(k, bound):
        share = ((t[k] - t['idle'])/EVERY + max(t['idle'] - t['bare'], 0))/t['bare']
        return Row(f'{name}: {k}, every {EVERY} steps / a step', share, at_most=bound, ms={n: round(t[n]*1e3, 3) for n in ('bare', 'idle', k)})
    return [row(k, bound) for k,(_,bound) in kinds.items()]


def bench_char_transformer():
    "The toy of the course: 117 thousand parameters, 2.3 million activations"
    kinds = {'gradients, sampled': (GRADS | SAMPLE, LIMIT), 'gradients': (GRADS, FULL), 'everything, sampled': (SAMPLE, FULL), 'everything': ({}, FULL)}
    return cost('character transformer', kinds) + cost('character transformer, FP32', {'gradients': (GRADS, None), 'everything': ({}, None)}, mixed=False)


def bench_wide():
    "Six blocks of width 256: 4.8 million parameters"
    return cost('six blocks of width 256', {'gradients': (GRADS, LIMIT), 'everything': ({}, LIMIT)}, 5 if DEVICE == 'cpu' else 31, d=256, layers=6, heads=4)


def bench_memory():
    "What Python and torch hold after 20 and after 220 collected steps"
    run = setting(watched=True)
    def held():
        gc.collect()
        tensors = sum(o.numel()*o.element_size() for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter))
        return tensors + tracemalloc.get_traced_memory()[0]
    tracemalloc.start()
    for _ in range(20): run()
    before = held()
    for _ in range(200): run()
    after = held(); tracemalloc.stop()
    return [Row('memory after 220 collections / after 20', after/before, at_most=1.01)]
