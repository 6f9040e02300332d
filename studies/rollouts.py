"""Does a policy learn from texts that a coarser copy of it wrote? (chapter 38)

A net writes 32 symbols, and each should be the one before plus one, modulo eight. The reward is the share
that is right, so the best is 1. The trainer (FP32) takes the policy gradient of texts that a *sampler*
wrote: the same weights, its products in E4M3 with a scale a tensor, or in E2M1. Rows: nothing is
corrected; each symbol weighted by its probability for the trainer over that for the sampler; the same, cut
at 2; both sides in the sampler's format; and a sampler whose readout is in FP32. `reward` is the trainer's own
after 200 steps, `early` that after 100, `gap` the root mean
square of the log-ratio in the last step.
"""
import torch, torch.nn.functional as F
from torch import nn

from mpcourse.fp8 import CastConfig, Recipe, fp32_scale, fp8_linear
from mpcourse.toys import seeded

FORMATS = {fmt: Recipe(*[CastConfig(fmt.lower(), scale=fp32_scale)]*2, CastConfig('e5m2', scale=fp32_scale)) for fmt in ('E4M3', 'E2M1')}
WAYS = 'as it is', 'weighted', 'weighted, cut at 2', 'both sides', 'readout in FP32'
ROWS = ['FP32'] + [f'{fmt}: {way}' for fmt in FORMATS for way in WAYS]
SEEDS = range(10)
SYMBOLS, LENGTH, TEXTS, STEPS = 8, 32, 64, 200


class Policy(nn.Module):
    "The last two symbols and the place, to logits"
    def __init__(self):
        super().__init__()
        self.emb, self.place = nn.Embedding(SYMBOLS, 16), nn.Embedding(LENGTH, 16)
        self.a, self.b, self.out = nn.Linear(48, 64), nn.Linear(64, 64), nn.Linear(64, SYMBOLS)

    def forward(self, last, t, recipe=None, readout=True):
        "last: (…, 2) symbols, t: (…) places"
        def linear(m, x, low=True): return fp8_linear(x, m.weight, m.bias, recipe) if recipe and low else m(x)
        h = torch.cat([self.emb(last).flatten(-2), self.place(t)], -1)
        h = F.gelu(linear(self.b, F.gelu(linear(self.a, h))))
        return linear(self.out, h, readout)


@torch.no_grad()
def write(policy, gen, recipe=None, readout=True):
    "Texts, and the log-probability of each symbol for who wrote it"
    texts, logs = torch.zeros(TEXTS, 2 + LENGTH, dtype=torch.long), []
    for t in range(LENGTH):
        logp = policy(texts[:, t:t + 2], torch.full((TEXTS,), t), recipe, readout).log_softmax(-1)
        texts[:, t + 2] = torch.multinomial(logp.exp(), 1, generator=gen)[:, 0]
        logs.append(logp.gather(1, texts[:, t + 2, None]))
    return texts, torch.cat(logs, 1)


def reward(texts): return ((texts[:, 2:] - texts[:, 1:-1]) % SYMBOLS == 1).float().mean(1)


def log_probs(policy, texts, recipe=None):
    last = texts.unfold(1, 2, 1)[:, :LENGTH]
    logp = policy(last, torch.arange(LENGTH).expand(TEXTS, -1), recipe).log_softmax(-1)
    return logp.gather(-1, texts[:, 2:, None])[..., 0]


def run(row, seed):
    "The trainer's reward early and at the end, and how far the two sides are apart"
    fmt, _, way = row.partition(': ')
    recipe, gen = FORMATS.get(fmt), torch.Generator().manual_seed(seed)
    with seeded(seed): policy = Policy()
    opt, early = torch.optim.Adam(policy.parameters(), 5e-4), 0.
    for i in range(STEPS):
        texts, theirs = write(policy, gen, recipe, way != 'readout in FP32')
        ours = log_probs(policy, texts, recipe if way == 'both sides' else None)
        gain = reward(texts)
        weight = torch.ones_like(theirs)
        if way.startswith('weighted'): weight = (ours.detach() - theirs).exp()
        if way.endswith('at 2'): weight = weight.clamp(max=2.)
        loss = -(weight*ours*(gain - gain.mean())[:, None]).sum(1).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if i == 99: early = reward(write(policy, gen)[0]).mean().item()
    gap = (ours.detach() - theirs).square().mean().sqrt().item()
    return dict(reward=reward(write(policy, gen)[0]).mean().item(), early=early, gap=gap)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
