"What an import costs and needs: each in a process of its own"
import ast, importlib.metadata, inspect, os, re, shutil, subprocess, sys, textwrap, zipfile
from pathlib import Path

import pytest
from conftest import ROOT

import mpcourse

pytestmark = pytest.mark.library


def python(code): return subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=200)


def test_the_drop_in_scaler_needs_no_pandas():
    r = python("import sys; sys.modules['pandas'] = None; import mpcourse.gradscaler as g, mpcourse.policies as p; g.GradScaler(p.get_policy('megatron'))")
    assert r.returncode == 0, r.stderr


@pytest.mark.parametrize('module', ['unit', 'unit_models'])
def test_unit_scaling_loads_no_compiler(module):
    r = python(f"import sys, mpcourse.{module}; print('torch._dynamo' in sys.modules)")
    assert r.stdout == 'False\n', r.stderr


# --- the public names ---

def test_the_public_names_cost_nothing_until_they_are_touched():
    r = python("""
import sys, mpcourse
assert 'torch' not in sys.modules and {'GradScaler', 'MonitorCB'} <= {*dir(mpcourse)}
from mpcourse import GradScaler, MixedStep, simulate_fp8
assert 'fastai' not in sys.modules
from mpcourse.gradscaler import GradScaler as same
assert GradScaler is same
try: mpcourse.GradScalar
except AttributeError as e: print(e)
""")
    assert r.stdout == "module 'mpcourse' has no attribute 'GradScalar'\n", r.stderr


def test_editors_see_the_public_names():
    "What type checkers read is what is imported at run time, and each name is there"
    tree = ast.parse(Path(mpcourse.__file__).read_text(encoding='utf-8'))
    block = next(n for n in tree.body if isinstance(n, ast.If))
    seen = [(n.module, a.name) for n in block.body for a in n.names if a.asname == a.name]
    assert seen == [(module, name) for module, names in mpcourse._NAMES.items() for name in names]
    for name in mpcourse.__all__: assert getattr(mpcourse, name).__doc__, name


def untyped(qualname, function):
    "Parameters without an annotation, but for self, *args and **kwargs; and a result without one"
    parameters = [*inspect.signature(function).parameters.values()]
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    for p in parameters:
        if p.annotation is p.empty and p.name not in ('self', 'cls') and p.kind not in variadic: yield f'{qualname}({p.name})'
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    returns = [n for n in ast.walk(tree) if isinstance(n, ast.Return) and n.value is not None]
    if returns and 'return' not in function.__annotations__ and function.__name__ != '__init__': yield f'{qualname} returns'


def test_public_names_are_typed():
    "`py.typed` promises that an editor knows what to give, and what comes back"
    import mpcourse.all                                   # which adds methods to some of them
    missing = []
    for name in mpcourse.__all__:
        public = getattr(mpcourse, name)
        if inspect.isfunction(public): missing += untyped(name, public)
        if not inspect.isclass(public): continue
        for n, f in vars(public).items():
            f = getattr(f, '__func__', getattr(f, 'fget', f))
            ours = inspect.isfunction(f) and f.__module__.startswith('mpcourse')
            generated = ours and '<string>' in f.__code__.co_filename        # a dataclass's __init__
            if ours and not generated and (not n.startswith('_') or n in ('__init__', '__call__')): missing += untyped(f'{name}.{n}', f)
    assert not missing, missing


ALONE = '''
import sys, torch, torch.nn.functional as F
from torch import nn
from mpcourse.als import ALSScaler
from mpcourse.dynamic import DynamicScaler
from mpcourse.fp8 import simulate_fp8
from mpcourse.gradscaler import GradScaler
from mpcourse.layerwise import LayerwiseScaler
from mpcourse.policies import get_policy
from mpcourse.scaler import StaticScaler
from mpcourse.step import MixedStep
from mpcourse.unit_models import unit_scale
import mpcourse.accumulate, mpcourse.ranks
torch.manual_seed(0)
x, y = torch.randn(64, 8), torch.randint(3, (64,))
def net(): return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
def falls(step, model):
    opt = torch.optim.Adam(model.parameters(), lr=.01)
    losses = [float(step(model, x, y, opt, F.cross_entropy)['loss']) for _ in range(40)]
    assert losses[-1] < losses[0] - .1, (step, losses[0], losses[-1])
for name in ('dynamic', 'torch', 'megatron', 'fastai', 'metaseq', 'logmax', 'backoff'): falls(MixedStep(get_policy(name)), net())
for scaler in (StaticScaler(2.**8), DynamicScaler(2.**10), ALSScaler(2.**4)): falls(MixedStep(scaler), net())
layered = net(); falls(MixedStep(LayerwiseScaler(layered)), layered)
model, gs = net(), GradScaler(init_scale=2.**8); opt = torch.optim.SGD(model.parameters(), lr=.1)
first = None
for _ in range(40):
    with torch.autocast('cpu', torch.float16): loss = F.cross_entropy(model(x).float(), y)
    first = first or loss.item()
    opt.zero_grad(); gs.scale(loss).backward(); gs.step(opt); gs.update()
assert loss < first - .05
assert simulate_fp8(net())(x).isfinite().all() and unit_scale(net())(x).isfinite().all()
assert not {'fastai', 'pandas', 'matplotlib', 'ipywidgets', 'scipy'} & set(sys.modules)
print('trained')
'''

TOLD = '''
import contextlib, io, sys, mpcourse
from mpcourse import *
assert 'MonitorCB' not in mpcourse.__all__ and GradScaler and not hasattr(mpcourse, 'nothing')
try: from mpcourse import MonitorCB
except ImportError as e: assert "MonitorCB is a callback of fastai, which is missing: pip install 'mpcourse[fastai]'" in str(e), e
out = io.StringIO()
import pydoc
with contextlib.redirect_stdout(out): pydoc.help(mpcourse)
assert 'class GradScaler' in out.getvalue() and 'probe_precision' in out.getvalue(), out.getvalue()[:300]
from mpcourse.cli import main
with contextlib.redirect_stdout(out): assert main(['doctor']) == 0
for argv in ('compare relu_mlp', 'advise relu_mlp', 'probe relu_mlp'):
    said = io.StringIO()
    with contextlib.redirect_stderr(said): code = main(argv.split())
    assert code == 2 and said.getvalue().count(chr(10)) == 1 and 'pip install' in said.getvalue(), (argv, code, said.getvalue())
print('told')
'''


def needed(name, found):
    "A distribution and all that it requires, without extras"
    from packaging.requirements import Requirement
    if name in found: return found
    try: found[name] = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError: return found
    for r in map(Requirement, found[name].requires or ()):
        if r.marker is None or r.marker.evaluate(dict(extra='')): needed(r.name.lower(), found)
    return found


@pytest.mark.sweep(0)
@pytest.mark.chapters('index')
def test_a_wheel_trains_beside_torch_fastcore_and_numpy_alone(tmp_path):
    pytest.importorskip('setuptools')
    source = tmp_path/'source'
    source.mkdir()
    for name in ('setup.py', 'settings.ini', 'pyproject.toml', 'MANIFEST.in', 'README.md', 'LICENSE', 'CONTRIBUTING.md', 'CHANGELOG.md'): shutil.copy(ROOT/name, source)
    shutil.copytree(ROOT/'mpcourse', source/'mpcourse')
    built = subprocess.run([sys.executable, '-m', 'pip', 'wheel', '-q', '--no-deps', '--no-build-isolation', '--no-index', '-w', tmp_path, source], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    site = tmp_path/'site'
    with zipfile.ZipFile(next(tmp_path.glob('*.whl'))) as z: z.extractall(site)
    assert (site/'mpcourse/py.typed').exists()
    about = next(site.glob('*.dist-info/METADATA')).read_text(encoding='utf-8')
    links = re.findall(r'\]\(([^)\s]+)', about.partition('\n\n')[2])
    assert len(links) > 50 and all(l.startswith(('https://', '#')) for l in links), [l for l in links if l[:4] != 'http']
    found = {}
    for name in ('torch', 'fastcore', 'numpy'): needed(name, found)
    for dist in found.values():
        for top in {f.parts[0] for f in dist.files} - {'..', '__pycache__'}:
            if not (site/top).exists(): (site/top).symlink_to(dist.locate_file(top))
    r = subprocess.run([sys.executable, '-S', '-c', ALONE], env=dict(os.environ, PYTHONPATH=str(site), OMP_NUM_THREADS='1'), cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert r.returncode == 0 and r.stdout == 'trained\n', r.stderr
    r = subprocess.run([sys.executable, '-S', '-c', TOLD], env=dict(os.environ, PYTHONPATH=str(site), OMP_NUM_THREADS='1'), cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert r.returncode == 0 and r.stdout == 'told\n', r.stderr
