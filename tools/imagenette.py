"Imagenette, 13,000 photographs in ten classes, read without torchvision"
from pathlib import Path

import numpy as np, torch

from mpcourse.toys import Data


def _untar_imagenette(size):
    "The unpacked folder, downloaded if need be"
    if size not in (160, 320): raise ValueError(f'Imagenette comes in the sizes 160 and 320, not {size}: take one of these.')
    try: from fastai.data.external import untar_data, URLs
    except ImportError as e:
        raise ImportError('Imagenette is downloaded by fastai, which is not installed: pip install fastai') from e
    try: return Path(untar_data(URLs.IMAGENETTE_160 if size == 160 else URLs.IMAGENETTE_320))
    except OSError as e:      # URLError, timeouts and refused connections are all OSErrors
        raise ConnectionError(f'Imagenette could not be downloaded ({e}): connect to a network, give the unpacked '
                              'folder as `path`, or use digits(), which needs neither.') from e


def _read_photos(folder, size, limit):
    "All photos of a folder of class folders, cut to squares: bytes (N, 3, size, size), classes (N,)"
    from PIL import Image, ImageOps
    classes = sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []
    files = [(f, k) for k, c in enumerate(classes) for f in sorted((folder / c).iterdir())
             if f.suffix.lower() in ('.jpeg', '.jpg', '.png')]
    if not files:
        raise FileNotFoundError(f'{folder} has no class folders with photos: give the folder imagenette2-160.')
    if limit: files = files[::max(1, -(-len(files) // limit))]
    x = np.stack([np.asarray(ImageOps.fit(Image.open(f).convert('RGB'), (size, size))) for f, _ in files])
    return torch.from_numpy(x).permute(0, 3, 1, 2).contiguous(), torch.tensor([k for _, k in files])


def imagenette(
    size: int = 160,          # pixels of a side: 160 or 320; any where `path` is given
    limit: int | None = None, # read at most so many photos of each part, evenly over the classes
    path=None,                # the unpacked folder, where it is already there
    device='cpu',             # where the tensors live
) -> Data: # photos (N, 3, size, size), uint8, which become fractions when a batch is drawn; ten classes
    "Imagenette, read without torchvision; needs a network the first time"
    root = Path(path) if path is not None else _untar_imagenette(size)
    parts = [tuple(t.to(device) for t in _read_photos(root / p, size, limit)) for p in ('train', 'val')]
    return Data('imagenette', *parts, 10)
