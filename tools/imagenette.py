"Imagenette, 13,000 photographs in ten classes, read without torchvision"
from math import ceil
from pathlib import Path

import numpy as np, torch

from mpcourse.toys import Data


def _untar_imagenette(size):
    "The unpacked folder, downloaded if need be"
    if size not in (160, 320):
        raise ValueError(f'Imagenette comes in the sizes 160 and 320, not {size}: '
                         'take one of these.')
    try: from fastai.data.external import untar_data, URLs
    except ImportError as e:
        raise ImportError('Imagenette is downloaded by fastai, which is not installed: '
                          'pip install fastai') from e
    try: return untar_data(getattr(URLs, f'IMAGENETTE_{size}'))
    except OSError as e:      # URLError, timeouts and refused connections are all OSErrors
        raise ConnectionError(f'Imagenette could not be downloaded ({e}): connect to a network, '
                              'give the unpacked folder as `path`, or use digits(), which needs '
                              'neither.') from e


def _list_photos(folder):
    "The photos of a folder of class folders, each with the number of its class"
    found = []
    classes = sorted(filter(Path.is_dir, folder.glob('*')))
    for number, photos in enumerate(classes):
        for path in sorted(photos.iterdir()):
            if path.suffix.lower() in ('.jpeg', '.jpg', '.png'): found.append((path, number))
    if not found:
        raise FileNotFoundError(f'{folder} has no class folders with photos: '
                                'give the folder imagenette2-160.')
    return found


def _read_photos(folder, size, limit):
    "All photos of a folder, cut to squares: bytes (N, 3, size, size), classes (N,)"
    from PIL import Image, ImageOps
    found = _list_photos(folder)
    if limit: found = found[::ceil(len(found)/limit)]
    paths, classes = zip(*found)
    squares = [ImageOps.fit(Image.open(path).convert('RGB'), (size, size)) for path in paths]
    x = torch.from_numpy(np.stack(squares)).permute(0, 3, 1, 2).contiguous()
    return x, torch.tensor(classes)


def imagenette(
    size: int = 160,          # pixels of a side: 160 or 320; any where `path` is given
    limit: int | None = None, # read at most so many photos of each part, evenly over the classes
    path=None,                # the unpacked folder, where it is already there
    device='cpu',             # where the tensors live
) -> Data: # photos (N, 3, size, size), bytes that become fractions in a batch; ten classes
    "Imagenette, read without torchvision; needs a network the first time"
    if path is None: path = _untar_imagenette(size)
    parts = []
    for name in ('train', 'val'):
        x, y = _read_photos(Path(path)/name, size, limit)
        parts.append((x.to(device), y.to(device)))
    return Data('imagenette', *parts, 10)
