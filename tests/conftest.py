"What the tests of the project share: its notebooks, small courses made on the spot, and a browser"
import functools, importlib, importlib.metadata, importlib.util, inspect, json, os, socket, subprocess, sys
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parent.parent
NBS = sorted((ROOT/'nbs').glob('*.ipynb'))
CHROME_ARGS = ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run',
               '--disable-background-networking',
               '--disable-component-update', '--disable-sync']

sys.path[:0] = [str(ROOT/'tests'), str(ROOT)]
import chromium


def each(names, values):
    "One test over many cases, where parametrize would make a test of each: all cases run, and those that fail are named"
    names, values = [n.strip() for n in names.split(',')], list(values)
    def decorate(test):
        @functools.wraps(test)
        def over_all(*args, **fixtures):
            import torch
            failed, skipped, state = [], 0, torch.get_rng_state()
            for value in values:
                torch.set_rng_state(state)
                case = dict(zip(names, value)) if len(names) > 1 else {names[0]: value}
                try: test(*args, **fixtures, **case)
                except pytest.skip.Exception: skipped += 1
                except (Exception, pytest.fail.Exception) as e:
                    failed.append(f'{case}: {type(e).__name__}: {e}')
            assert not failed, f'{len(failed)} of {len(values)} cases:\n' + '\n'.join(f[:1000] for f in failed[:20])
            if skipped and skipped == len(values): pytest.skip('every case was skipped')
        known = inspect.signature(test)
        kept = [q for n, q in known.parameters.items() if n not in names]
        over_all.__signature__ = known.replace(parameters=kept)
        return over_all
    return decorate


def pytest_collection_modifyitems(items):
    "What depends on sockets, other processes or a browser gets a second try, and the report shows it"
    for item in items:
        if {'ranks', 'browser', 'lab'} & set(item.fixturenames): item.add_marker(pytest.mark.flaky(reruns=1))
        # of CPython 3.11: seldom, `ast.parse` says that the depth of its recursion does not match
        else: item.add_marker(pytest.mark.flaky(reruns=1, only_rerun=['SystemError']))


@pytest.fixture(autouse=True)
def one_thread():
    "One torch thread in each test: results and times do not depend on the machine's cores"
    import torch
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


RANK = '''
import os, sys, torch, torch.distributed as dist
torch.set_num_threads(1)
rank, world, folder = {rank}, {world}, {folder!r}
dist.init_process_group('gloo', init_method=f'file://{{folder}}/meet', rank=rank, world_size=world)
{code}
dist.barrier(); dist.destroy_process_group(); sys.stdout.flush(); sys.stderr.flush()
os._exit(0)     # gloo's threads, on their way out, abort a process now and then: "terminate called without an active exception"
'''


def started(codes, logs):
    "Run pieces of code in processes of their own; returns their exit codes"
    procs = [subprocess.Popen([sys.executable, '-c', code], stderr=open(log, 'w')) for code, log in zip(codes, logs)]
    try: return [p.wait(timeout=200) for p in procs]
    finally:
        for p in procs: p.kill()        # where one waits for a rank that is gone


def forked(codes, logs):
    "The same, from a process that has torch already, if `suite.py` runs the tests"
    if 'MPCOURSE_FORKS' not in os.environ: return started(codes, logs)
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ['MPCOURSE_FORKS'])
        order = dict(ranks=list(zip(codes, map(str, logs))), env=dict(os.environ), timeout=200)
        server.sendall(json.dumps(order).encode() + b'\n')
        return json.loads(server.makefile().read())


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    "Run code in gloo processes, with `rank` and `folder`; returns what each saved with torch.save(…, f'{folder}/{rank}.pt')"
    def run(code, n=2, ends=0):
        "ends is the exit code of each; they leave nothing to load where it is not 0"
        import torch
        (tmp_path/'meet').unlink(missing_ok=True)
        monkeypatch.setenv('OMP_NUM_THREADS', '1')
        monkeypatch.setenv('PYTHONPATH', str(ROOT/'tests'), prepend=os.pathsep)
        logs = [tmp_path/f'{rank}.log' for rank in range(n)]
        codes = [RANK.format(code=code, rank=rank, world=n, folder=str(tmp_path)) for rank in range(n)]
        for status, log in zip(forked(codes, logs), logs): assert status == ends, log.read_text()[-3000:]
        return None if ends else [torch.load(tmp_path/f'{r}.pt', weights_only=False)
                                  for r in range(n)]
    return run


@contextmanager
def as_if_absent(package):
    "What asks the package manager for it, or imports it, is told that it is not there"
    def hide(real):
        def ask(name, *args):
            if name == package: raise importlib.metadata.PackageNotFoundError(name)
            return real(name, *args)
        return ask
    for n in [n for n in sys.modules if n.split('.')[0] == package]: del sys.modules[n]
    with pytest.MonkeyPatch.context() as m:
        m.setitem(sys.modules, package, None)
        for f in ('version', 'distribution'): m.setattr(importlib.metadata, f, hide(getattr(importlib.metadata, f)))
        yield


@pytest.fixture(scope='session')
def lightning():
    "Lightning asks torchmetrics, which asks torchvision, which does not load beside a torch of another build"
    if importlib.util.find_spec('lightning') is None: pytest.skip('Lightning is not installed')
    if 'lightning.pytorch' not in sys.modules:
        try: import torchvision  # noqa: F401
        except (ImportError, RuntimeError):
            with as_if_absent('torchvision'): importlib.import_module('lightning.pytorch')
    return pytest.importorskip('lightning.pytorch')


# every way of a tensor's value to the host
LOOKING = ('item', '__bool__', '__float__', '__int__', 'tolist', 'numpy', '__index__')


@pytest.fixture
def looks(monkeypatch):
    "The names of all looks from the host at a tensor's value, as they happen"
    import torch
    seen = []
    for n in LOOKING:
        orig = getattr(torch.Tensor, n)
        def look(self, *a, _n=n, _o=orig, **k):
            seen.append(_n)
            return _o(self, *a, **k)
        monkeypatch.setattr(torch.Tensor, n, look)
    return seen


@pytest.fixture
def small_course(tmp_path):
    "Write notebooks from {stem: [cells]}; a cell that starts with '# ' or '::: ' or '%md ' is Markdown; returns their folder"
    def write(**stems):
        from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, writes
        nbs = tmp_path/'nbs'
        nbs.mkdir(exist_ok=True)
        for stem, cells in stems.items():
            made = [new_markdown_cell(c.removeprefix('%md ')) if c.startswith(('# ', ':::', '%md '))
                    else new_code_cell(c) for c in cells]
            path = nbs/f'{stem.lstrip("_")}.ipynb'
            path.write_text(writes(new_notebook(cells=made)), encoding='utf-8')
        return nbs
    return write


def open_in_python(request):
    "A file that the browser opens, so that `reads.py` notes it"
    url = urlsplit(request.url)
    if url.scheme == 'file': open(unquote(url.path)).close()


@pytest.fixture(scope='session')
def browser(tmp_path_factory):
    "A Chromium, or a skip that says why there is none"
    path = chromium.find()
    if path is None: pytest.skip('there is no Chromium here')
    sync_api = pytest.importorskip('playwright.sync_api')
    with sync_api.sync_playwright() as p:
        profile = str(tmp_path_factory.mktemp('profile'))
        ctx = p.chromium.launch_persistent_context(profile, executable_path=path,
                                                   headless=True, args=CHROME_ARGS)
        ctx.on('request', open_in_python)
        yield ctx
        ctx.close()


@pytest.fixture(scope='session')
def course_pages():
    "The pages that `make course` or `make test` made; under `make test` they must be there"
    out = ROOT/'_course'
    if not (out/'index.html').exists():
        if os.environ.get('MPCOURSE_TEST'): pytest.fail('make test made no pages')
        pytest.skip('there is no _course/ yet: run make course')
    return out


def barriers(page):
    "What axe-core calls serious or critical on an open page"
    axe = pytest.importorskip('axe_playwright_python.sync_playwright').Axe()
    return [(v['id'], v['nodes'][0]['html'][:120]) for v in axe.run(page).response['violations']
            if v['impact'] in ('serious', 'critical')]
