"""Is the advice of chapter 34 right? The nets of chapter 33, on which its rules were tried, and
eleven others

A row is a net. The advisor watches it with a seed that no judged training has (100 more). On the
eleven each scheme is also *tried*, which is the rival: trained for the same hundred steps from the
same weights, the mean of the last 20 training losses compared with FP32's. For each scheme: the
verdict (1 yes, 0 no, .5 cannot tell, -1 cannot run), and the share of what FP32 learnt that is
lost in the trial. What the schemes do in the end is in `studies/every_scheme.py` and
`studies/new_nets.py`.
"""
import math, time
from dataclasses import replace
from itertools import islice

import every_scheme, new_nets
from mpcourse.advise import STEPS, STORED, advise_schemes
from mpcourse.compare import attempt, lost_share

NETS = every_scheme.NETS | new_nets.NETS
SCHEMES = STEPS + tuple(STORED)
CODES = {'yes': 1., 'no': 0., 'cannot tell': .5, 'cannot run': -1.}
ROWS = list(NETS)
SEEDS = range(3)


def tried(scheme, net, seed, steps=100):
    "Training loss before and after some steps"
    t = NETS[net](seed)
    return attempt(scheme, replace(t, score=None, batches=lambda: islice(t.batches(), steps)), seed)


def run(row, seed):
    "Verdicts, trials, and the seconds of both"
    start, t = time.perf_counter(), NETS[row](seed + 100)
    advice = advise_schemes(t.model, t.opt(t.model.parameters()), t.loss_func, t.batches(), 100,
                            t.schedule, SCHEMES)
    middle = time.perf_counter()
    found = {s: CODES[advice.verdicts[s][0]] for s in SCHEMES} | dict(seconds=middle - start)
    if row not in new_nets.NETS: return found
    fp32 = tried('FP32', row, seed + 100)
    for s in SCHEMES:
        got = tried(s, row, seed + 100)
        lost = math.nan
        if not got['refused']: lost = lost_share(got['score'], fp32['before'], fp32['score'])
        found[f'{s}, tried'] = lost
    return found | dict(seconds_tried=time.perf_counter() - middle)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
