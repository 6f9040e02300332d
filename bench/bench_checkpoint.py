"""What saving costs after many steps: a list with one loss for each step is part of the training state.

Each save comes after 100 more steps, as with `every=100`; so the beginning of the list was packed by an earlier save."""
import tempfile
from pathlib import Path
from unittest.mock import patch

import torch
from harness import medians, ratio
from mpcourse.checkpoint import save_training_state


def bench_history():
    "Saves after 100, 10,000 and 100,000 steps, of a small net"
    net = torch.nn.Linear(64, 64)
    opt = torch.optim.SGD(net.parameters(), lr=.1)
    # what the disk takes is another matter
    with tempfile.TemporaryDirectory() as folder, patch('os.fsync'):
        def saver(n):
            losses = [torch.rand(()) for _ in range(n - 100)]
            def save():
                if n == 100: losses.clear()
                losses.extend(torch.rand(()) for _ in range(100))
                save_training_state(Path(folder)/f'{n}.pt', net, opt, losses=losses)
            return save
        t = medians({f'{n:,} steps': saver(n) for n in (100, 10_000, 100_000)}, repeats=11)
    return [ratio(f'a save after {n} steps / after 100', t, f'{n} steps', '100 steps',
                  at_most=bound)
            for n, bound in (('10,000', 3), ('100,000', 10))]
