"""Which policies bring the two towers through ten bad batches? (chapter 16)

A row is a policy and the step at which the storm begins. All start from 2^16; the loss is divided by
1,024, as a mean over so many micro-batches would divide it. Learnt: the loss ends below 1.5.
"""
from mpcourse.dynamic import DynamicScaler
from mpcourse.scaler1 import StaticScaler
from mpcourse.simulator import fly, hard_batches
from mpcourse.toys import get_toy


def grows(interval):
    "Torch's policy, impatient"
    return DynamicScaler(growth_interval=interval)


ROWS = {'FP32': ('fp32', 30), 'torch, no storm': ('torch', None), 'torch': ('torch', 30),
        'Megatron': ('megatron', 30), 'metaseq': ('metaseq', 30), 'interval 100': (grows(100), 30),
        'interval 10': (grows(10), 30), 'interval 1': (grows(1), 30),
        'static 2^16': (StaticScaler(2.**16), 30), 'floor 2^12': (DynamicScaler(floor=2.**12), 30),
        'FP32, at 300': ('fp32', 300), 'torch, at 300': ('torch', 300),
        'Megatron, at 300': ('megatron', 300)}
SEEDS = range(5)


def run(row, seed):
    "Final loss, whether it learnt, zeros of the first layer, lowest and last log2 scale, skipped steps"
    pilot, at = ROWS[row]
    toy, n = get_toy('two_towers'), 10 if at else 0
    storm = hard_batches(n, at or 0, after=toy.steps - (at or 0) - n)
    found = fly(toy.model, toy.data(), {row: pilot}, storm, bs=toy.bs, opt=toy.opt, loss_func=toy.loss_func,
                start=2.**16, schedule=toy.schedule(toy.steps), clip=1., divisor=1024., watch='image.1.',
                seed=seed)
    end = {k: float(v) for k, v in found.table().loc[row].items()}
    rest = {k: end[k] for k in ('zeros', 'lowest', 'end', 'skipped')}
    return dict(loss=end['loss'], learnt=end['loss'] < 1.5, **rest)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
