"""What do the recipes for eight bits cost the course's GPT? (chapter 27)

`char_lm` of chapter 03, 80 steps; the loss is the mean of the last ten. As in torchao and
TransformerEngine, linear layers are converted and attention's two products are not, except where a
row says `attention too`. The mean over 1,024 characters divides by a power of two; in the rows × 1.4
the loss is so much larger.
"""
from dataclasses import replace

from fp8_opening import train
from mpcourse.fp8 import RECIPES

RECIPE = {k: k for k in ('tensorwise', 'delayed', 'rowwise', 'block', 'mx', 'mx_floor')}
RECIPE |= {'mx_floor, readout in FP32': 'mx_floor', 'tensorwise, attention too': 'tensorwise',
           'mx, attention too': 'mx'}
RECIPE |= {'mx_floor for gradients only': replace(RECIPES['mx'], g=RECIPES['mx_floor'].g)}
RECIPE |= {f'{name}, loss × 1.4': name for name in ('mx', 'mx_floor')}
ROWS = ['gpt: FP32', *[f'gpt: {name}' for name in RECIPE]]
SEEDS = range(5)


def run(row, seed):
    "Mean of the last ten training losses"
    name = row.removeprefix('gpt: ')
    keep = 'head' if 'readout' in name else ()
    scale = 1.4 if 'loss' in name else 1.
    return train(RECIPE.get(name), seed, scale, keep=keep, attention='attention' in name)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
