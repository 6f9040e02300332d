"""What does autocast do to a published model whose forces are derivatives? (appendix, real models)

CHGNet 0.4 (BSD, 412,525 trained weights, in its wheel) gives the energy of a crystal; the forces are
its gradient. A seed is a crystal: one of ten salts, its atoms moved by .1 Å. A row is a dtype of
autocast, on the model as it is, or with its two geometry encoders in FP32. The values: are all forces
finite; the errors of energy (eV an atom) and of forces (eV/Å; 0 if some are not finite), and FP32's
largest force; and does the sanitizer name the guard of the arc cosine, encoders.py:144. Needs
`pip install chgnet`, and is not part of `make studies`.
"""
import warnings

import numpy as np, torch

from mpcourse import sanitize

SALTS = (('Na', 'Cl', 5.69), ('Mg', 'O', 4.21), ('Li', 'F', 4.03), ('K', 'Br', 6.6), ('Ca', 'O', 4.81), ('Li', 'Cl', 5.13),
         ('Na', 'F', 4.63), ('Mn', 'O', 4.44), ('Fe', 'O', 4.33), ('Ni', 'O', 4.18))     # and lattice constants in Å
DTYPES = {'BF16': torch.bfloat16, 'FP16': torch.float16}
ROWS = [f'{dtype}{geometry}' for geometry in ('', ', geometry in FP32') for dtype in DTYPES]
SEEDS = range(10)
GEOMETRY = 'AngleEncoder', 'BondEncoder'


def crystal(seed):
    "A salt whose atoms are a little out of place"
    from pymatgen.core import Lattice, Structure
    first, second, length = SALTS[seed]
    moved = np.random.default_rng(seed).normal(size=(8, 3))
    structure = Structure.from_spacegroup('Fm-3m', Lattice.cubic(length), [first, second], [[0, 0, 0], [.5, .5, .5]])
    for i, v in enumerate(moved): structure.translate_sites([i], .1*v/np.linalg.norm(v), frac_coords=False)
    return structure


def run(row, seed):
    "How far energy and forces are from FP32's"
    warnings.simplefilter('ignore')
    from chgnet.model import CHGNet
    model = CHGNet.load(use_device='cpu', verbose=False)
    graph = model.graph_converter(crystal(seed))
    def predicted():
        found = model([graph], task='ef')
        return found['e'].float().detach(), found['f'][0].float().detach()
    energy, forces = predicted()
    if 'geometry' in row:
        for module in model.modules():
            if type(module).__name__ in GEOMETRY: module.forward = torch.autocast('cpu', enabled=False)(module.forward)
    half = torch.autocast('cpu', DTYPES[row[:4]])
    with half: low_energy, low_forces = predicted()
    with sanitize() as report, half: predicted()
    named = any('encoders.py:144' in str(finding) for finding in report.findings)
    finite = low_forces.isfinite().all()
    return dict(finite=finite, energy=(low_energy - energy).abs().max().nan_to_num(0.), force=(low_forces - forces).abs().max() if finite else 0.,
                largest=forces.abs().max(), named=named)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
