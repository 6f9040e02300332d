"""What watching costs: a collection every 10 steps as a share of the training step.

The step is a character transformer's in mixed precision: forward, backward and Adam (`MixedStep`; on a CPU within `fp32_accumulate`). The cost is a step that collects minus one
that does not, divided by ten; what an idle step costs beside one without a collector has a row of its own. Judged is a model of 25 million parameters; the toy of the course, whose step is
short, is there to be read. On a CPU processor time is measured, which other programs on the machine hardly disturb."""
import gc, time, tracemalloc
from statistics import median

import torch
from harness import Row
from mpcourse.monitor import TensorCollector
from mpcourse.scaler import StaticScaler
from mpcourse.step import MixedStep
from mpcourse.toys import CharTransformer, cross_entropy, seeded

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
CLOCK = time.perf_counter if DEVICE == 'cuda' else time.process_time
EVERY = 10
GRADS = dict(kinds=('weight_grad', 'activation_grad'))


def wait():
    if DEVICE == 'cuda': torch.cuda.synchronize()


def setting(watched=None, watch={}, **kw):
    "A step of the character transformer; watched: are steps collected? None: there is no collector"
    with seeded(0): model = CharTransformer(**kw).to(DEVICE)
    opt, scaler = torch.optim.Adam(model.parameters(), lr=1e-3), StaticScaler(1024.).to(DEVICE)
    step = MixedStep(scaler)
    x = torch.randint(96, (16, 64), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    c = None
    if watched is not None:
        c = TensorCollector(model, lambda n: watched, opt=opt, scaler=scaler, keep=10, **watch)
    def run():
        out = step(model, x, x, opt, cross_entropy)
        if c is not None: c.step(out['loss'])
        wait()
    return run


def cost(name, kinds, repeats, **kw):
    "Costs of collections, spread over the steps until the next; kinds: name -> (arguments of the collector, bound)"
    runs = {'bare': setting(**kw), 'idle': setting(False, **kw)}
    for kind, (watched, _) in kinds.items(): runs[kind] = setting(True, watched, **kw)
    times = {k: [] for k in runs}
    for run in runs.values(): run()
    for _ in range(repeats):
        for k, run in runs.items():
            start = CLOCK()
            run()
            times[k].append(CLOCK() - start)
    t = {k: median(v) for k, v in times.items()}
    def row(k, bound):
        share = 1 + (t[k] - t['idle'])/EVERY/t['bare']
        return Row(f'{name}: {k}, every {EVERY} steps', share, at_most=bound,
                   ms={n: round(t[n]*1e3, 3) for n in ('bare', 'idle', k)})
    idle = Row(f'{name}: a collector that is not due', t['idle']/t['bare'],
               at_most=kinds['everything'][1] and 1.02)
    return [idle, *(row(k, bound) for k, (_, bound) in kinds.items())]


def bench_char_transformer():
    "The toy of the course: 117 thousand parameters, 2.3 million activations"
    return cost('character transformer', {'gradients': (GRADS, None), 'everything': ({}, None)}, 15)


def bench_wide():
    "Two blocks of width 1,024: 25 million parameters"
    kinds = {'gradients': (GRADS, 1.02), 'everything': ({}, 1.06)}
    return cost('two blocks of width 1,024', kinds, 7 if DEVICE == 'cpu' else 31, d=1024, layers=2,
                heads=8)


def bench_memory():
    "What Python and torch hold after 60 and after 260 collected steps"
    run = setting(watched=True)
    def held():
        gc.collect()
        tensors = sum(o.numel()*o.element_size() for o in gc.get_objects()
                      if type(o) in (torch.Tensor, torch.nn.Parameter))
        return tensors + tracemalloc.get_traced_memory()[0]
    tracemalloc.start()
    for _ in range(60): run()
    before = held()
    for _ in range(200): run()
    after = held(); tracemalloc.stop()
    return [Row('memory after 260 collections / after 60', after/before, at_most=1.01)]
