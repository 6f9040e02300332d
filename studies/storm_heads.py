"""Which policy survives a storm that neither loss nor accuracy shows? The net that reads and
draws, twenty bad batches (chapter 14)

A row is a policy and a storm of twenty batches from step 30 of 200. `bright`: one picture of
twenty is 100,000 times too bright, so in FP16 the loss is not finite. `NaN`: the loss is finite,
and the gradient of the predictions is NaN. Gradients are clipped at a norm of 1. FP32, too, skips
a step whose gradients are not finite. Every policy has its own start; the line is `if not
loss.isfinite(): continue`, in a loop with torch's scaler.
"""
import torch

from mpcourse.als import ALSScaler
from mpcourse.dynamic import DynamicScaler
from mpcourse.policies import get_policy
from mpcourse.scaler import StaticScaler
from mpcourse.step import MixedStep
from mpcourse.toys import batches, drawings, fit, heads_loss, heads_score, two_heads
from storm_study import fp32_step, in_storm, torchs_step

STORMS = {'none': (1, 30, 0, None), 'bright': (1, 30, 20, None), 'NaN': (1, 30, 20, float('nan'))}


def measured(seed, data):
    "A scale measured on the first batch"
    return StaticScaler.measured(two_heads(seed), next(batches(data, 256, 1, seed)), heads_loss)


def floored(seed, data):
    "Torch's rule from a measured scale, with a floor four octaves below it"
    scale = measured(seed, data).scale.item()
    return DynamicScaler(scale, min_scale=scale/16, skip_nonfinite_loss=False)


POLICIES = {'FP32': None, 'BF16': None, 'torch': lambda *_: get_policy('torch'),
            'torch and the line': None,
            'torch, interval 20': lambda *_: get_policy('torch', growth_interval=20),
            'torch, interval 5': lambda *_: get_policy('torch', growth_interval=5),
            'torch from 2^24': lambda *_: get_policy('torch', init_scale=2.**24),
            'Megatron': lambda *_: get_policy('megatron'), 'metaseq': lambda *_: get_policy('metaseq'), 'hold': lambda *_: DynamicScaler(),
            'measured, constant': measured, 'constant 2^16': lambda *_: StaticScaler(2.**16),
            'measured, floor 2^-4 of it': floored, 'ALS': lambda *_: ALSScaler()}
# the others never move without a storm
CALM = 'FP32', 'BF16', 'torch', 'torch, interval 20', 'torch, interval 5', 'torch from 2^24', 'Megatron', 'metaseq', 'measured, constant', 'constant 2^16', 'ALS'
ROWS = [f'{policy}: {storm}' for policy in POLICIES for storm in STORMS if storm != 'none'
        or policy in CALM]
SEEDS = range(10)


def step_of(policy, seed, data):
    "The step of a policy"
    if policy == 'FP32': return fp32_step(1.)
    if policy == 'torch and the line': return torchs_step(torch.amp.GradScaler('cpu'), 1.)
    if policy == 'BF16': return MixedStep(StaticScaler(1.), torch.bfloat16, clip=1.)
    return MixedStep(POLICIES[policy](seed, data), clip=1.)


def run(row, seed):
    "Mean of the last 20 losses, accuracy and drawing error on new digits, lowest and last log2 scale, skipped steps"
    policy, storm = row.split(': ')
    data, model = drawings(), two_heads(seed)
    step = in_storm(step_of(policy, seed, data), storm, seed, STORMS)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    seen = fit(model, batches(data, 256, 200, seed), opt, heads_loss, step)
    accuracy, error = heads_score(model, data)
    scale = torch.tensor(seen['scale']).log2()
    return dict(loss=sum(seen['loss'][-20:])/20, accuracy=accuracy, error=error, lowest=scale.min(),
                end=scale[-1],
                skipped=sum(seen['skipped']))


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
