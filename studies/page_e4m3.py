"""Does one loss scale train two heads in E4M3? (chapter 27)

The net of the front page, 150 steps. A row is a loss scale; in the rows *uncut* E4M3 has no largest
number, so nothing is cut at 448.
"""
import numpy as np, torch

from mpcourse.rounding import quantize
from mpcourse.toys import _PageNet, _page_score

ROWS = [f'2^{k}' for k in (12, 15, 16, 17, 18)] + ['2^17, uncut', '2^18, uncut']
SEEDS = range(5)


class Uncut(_PageNet):
    "E4M3 without a largest number"
    def cast(self, a):
        "Round to E4M3, and beyond 448 with as many digits"
        wide = quantize(torch.from_numpy(a), 'e8m3').numpy()
        return np.where(np.abs(a) > 448, wide, super().cast(a))


def run(row, seed):
    "Accuracy on new digits, and the error of their drawings"
    S = 2.**int(row.removeprefix('2^').removesuffix(', uncut'))
    net = (Uncut if 'uncut' in row else _PageNet)('e4m3', seed=seed, exact=False)
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
