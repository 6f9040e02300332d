"""Does one loss scale train two heads in E4M3? (chapter 27)

The net of the front page, 150 steps. A row is a loss scale; in the rows *uncut* E4M3 has no largest
number, so nothing is cut at 448. In the rows *E5M2* the gradients are E5M2, as in Micikevicius et al.
(2022); in the rows *alone* the other head's loss counts nothing.
"""
from unittest.mock import patch

import numpy as np, torch

from mpcourse.formats import get_format
from mpcourse.rounding import quantize
from mpcourse.toys import _page_loss, _PageNet, _page_score

ROWS = [f'2^{k}' for k in (12, 15, 16, 17, 18)] + ['2^17, uncut', '2^18, uncut']
ROWS += [f'2^{k}, E5M2' for k in (0, 6, 12, 18, 22)]
ROWS += [f'2^{k}, reading alone' for k in (6, 12)] + [f'2^{k}, drawing alone' for k in (12, 18, 22)]
HEADS = {'reading alone': 'name', 'drawing alone': 'draw.3'}
SEEDS = range(5)


class Uncut(_PageNet):
    "E4M3 without a largest number"
    def cast(self, a):
        "Round to E4M3, and beyond 448 with as many digits"
        wide = quantize(torch.from_numpy(a), 'e8m3').numpy()
        return np.where(np.abs(a) > 448, wide, super().cast(a))


class OneHead(_PageNet):
    "Only one head learns"
    def backward(self, *args):
        "The gradient of the other head's outputs is zero"
        def one(*args):
            losses, heads = _page_loss(*args)
            return losses, {name: g*np.float32(name == self.head) for name, g in heads.items()}
        with patch('mpcourse.toys._page_loss', one): return super().backward(*args)


class TwoFormats(_PageNet):
    "Gradients in E5M2, everything else in E4M3"
    def backward(self, *args):
        "Cast to E5M2 on the way back"
        forward, self.fmt = self.fmt, get_format('e5m2')
        grads = super().backward(*args)
        self.fmt = forward
        return grads


def run(row, seed):
    "Accuracy on new digits, and the error of their drawings"
    k, _, kind = row.removeprefix('2^').partition(', ')
    S = 2.**int(k)
    kinds = {'uncut': Uncut, 'E5M2': TwoFormats} | dict.fromkeys(HEADS, OneHead)
    net = kinds.get(kind, _PageNet)('e4m3', seed=seed, exact=False)
    net.head = HEADS.get(kind)
    for _ in range(150):
        x, y = net.batch()
        low = {name: net.cast(w) for name, w in net.weights.items()}
        grads = net.backward(low, net.forward(low, net.cast(x)), y, S)
        net.adam({name: g/np.float32(S) for name, g in grads.items()})
    accuracy, error = _page_score(net)
    return dict(accuracy=accuracy, error=error)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
