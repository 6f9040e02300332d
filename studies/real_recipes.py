"""What does each recipe for eight and four bits cost a real language model? (page 94)

SmolLM2-135M under `simulate_fp8`: all products but the logits, attention's among them. A seed is a
text of `real_formats`; the value is its mean loss in nats. Only the forward pass is tried. Delayed
scales have seen the next text, which fills their history.
"""
import torch

from mpcourse.fourbits import FP4_RECIPES
from mpcourse.fp8 import RECIPES, simulate_fp8
from mpcourse.real import text_loss
from mpcourse.toys import seeded
from real_formats import SEEDS, loaded

ROWS = ['FP32', *RECIPES, *FP4_RECIPES]


def run(row, seed):
    "The loss of a text"
    model, texts = loaded()
    ids = texts[seed:seed + 1]
    if row != 'FP32': model = simulate_fp8(model, row, keep='lm_head')
    with torch.no_grad(), seeded(seed):
        if row == 'delayed':
            model.train()(texts[(seed + 1) % len(texts)][None])
            model.eval()
        return dict(loss=text_loss(model(ids), ids).item())


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
