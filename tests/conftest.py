"What the tests of the project share: its notebooks, small courses made on the spot, and a browser"
import functools, inspect, os, shutil, subprocess, sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NBS = sorted((ROOT/'nbs').glob('*.ipynb'))
CHROME = next((p for n in ('chromium', 'chromium-browser', 'google-chrome')
               if (p := shutil.which(n))), None)
CHROME_ARGS = ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run',
               '--disable-background-networking',
               '--disable-component-update', '--disable-sync']

sys.path[:0] = [str(ROOT/'tests'), str(ROOT)]
from unchanged import chapters_of


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
        if {'ranks', 'browser', 'lab'} & set(item.fixturenames):
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_runtest_logreport(report):
    "One word a result for `make test`, written as it comes, so that a run that dies counts as far as it got"
    path = os.environ.get('MPCOURSE_REPORT')
    if not path or 'PYTEST_XDIST_WORKER' in os.environ or report.outcome == 'rerun': return
    if report.when == 'call' or report.outcome != 'passed':
        with open(path, 'a') as f: f.write(report.outcome + '\n')


opened = set()


def note_chapters(event, args):
    "Note what is opened of the chapters, their pages and the texts"
    if event != 'open': return
    path = str(args[0])
    parts = path.removeprefix(str(ROOT) + os.sep).split(os.sep)
    if path.startswith(str(ROOT)) and (path.endswith(('.ipynb', '.md')) or parts[0] == '_course'): opened.add(path)


sys.addaudithook(note_chapters)


def unmarked(item):
    "What is wrong if a test reads a chapter and does not say so; `make test` would leave it out when the chapter changes"
    if opened and not chapters_of(item): return f'It reads {min(opened)}: mark it with @pytest.mark.chapters.'


@pytest.fixture(autouse=True)
def chapters_are_marked(request):
    opened.clear()
    yield
    if unmarked(request.node): pytest.fail(unmarked(request.node))


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
rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group('gloo', init_method=f'file://{{folder}}/meet', rank=rank, world_size=world)
{code}
dist.barrier(); dist.destroy_process_group(); sys.stdout.flush(); sys.stderr.flush()
os._exit(0)     # gloo's threads, on their way out, abort a process now and then: "terminate called without an active exception"
'''


@pytest.fixture
def ranks(tmp_path):
    "Run code in gloo processes, with `rank` and `folder`; returns what each saved with torch.save(…, f'{folder}/{rank}.pt')"
    def run(code, n=2, ends=0):
        "ends is the exit code of each; they leave nothing to load where it is not 0"
        import torch
        (tmp_path/'meet').unlink(missing_ok=True)
        env = {**os.environ, 'OMP_NUM_THREADS': '1',
               'PYTHONPATH': os.pathsep.join([str(ROOT/'tests'), os.environ.get('PYTHONPATH', '')])}
        procs = [subprocess.Popen([sys.executable, '-c', RANK.format(code=code), str(r), str(n),
                                   str(tmp_path)], env=env, text=True,
                                  stderr=subprocess.PIPE) for r in range(n)]
        try: errs = [p.communicate(timeout=200)[1] for p in procs]
        finally:
            for p in procs: p.kill()        # where one waits for a rank that is gone
        for p,err in zip(procs, errs): assert p.returncode == ends, err[-3000:]
        return None if ends else [torch.load(tmp_path/f'{r}.pt', weights_only=False)
                                  for r in range(n)]
    return run


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


@pytest.fixture(scope='session')
def browser(tmp_path_factory):
    "A Chromium, or a skip that says why there is none"
    if CHROME is None: pytest.skip('there is no Chromium here')
    sync_api = pytest.importorskip('playwright.sync_api')
    with sync_api.sync_playwright() as p:
        profile = str(tmp_path_factory.mktemp('profile'))
        ctx = p.chromium.launch_persistent_context(profile, executable_path=CHROME,
                                                   headless=True, args=CHROME_ARGS)
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
