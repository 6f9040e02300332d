"""Runs files of tests on all cores, each in a process of its own, and leaves out what passed before with the same files.

    python tests/suite.py [-n4] [files] [options of pytest]

A process that has imported the packages forks the others, so that a file costs no more than its tests,
and what it opens is what it depends on (`reads.py`, `unchanged.py`). MPCOURSE_REPORT gets one line for each test."""
import gc, importlib, json, os, signal, socket, sys, sysconfig, tempfile, time, traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import unchanged as U

ROOT = U.ROOT
RUN_ALL = os.environ.get('CI') == 'true' or bool(os.environ.get('ALL'))
PACKAGES = '''pytest hypothesis numpy torch torch._dynamo torch.distributed matplotlib.pyplot pandas scipy.stats sklearn.datasets
              IPython.display ipywidgets fastai.basics fastai.callback.all nbclient nbconvert nbformat.v4 bs4 ml_dtypes gfloat'''.split()
SLOWEST = 8
# begin with these where nothing is known
LONG = 'marking live course claims cases failures exercises checkpoint studies ranks structure browser unit'.split()


def tell(outcomes):
    "A line for each test, as they come, so that a file that dies counts as far as it got"
    path = os.environ.get('MPCOURSE_REPORT')
    if not path: return
    with open(path, 'a') as f: f.writelines(f'{outcome} {name}\n' for name, outcome in outcomes.items())


def stems_of(item):
    "The chapters that a mark or a parameter names"
    known = {p.stem for p in (ROOT/'nbs').glob('*.ipynb')}
    marks = item.iter_markers('chapters')
    params = item.callspec.params.values() if hasattr(item, 'callspec') else []
    named = {str(getattr(p, 'stem', p)) for p in params}.union(*(mark.args for mark in marks))
    return sorted(named & known)


def sample(items):
    "Without the cases of a test marked sweep(n) but every nth; sweep(0) leaves none"
    seen, chosen = Counter(), []
    for item in items:
        name, every = item.nodeid.partition('[')[0], [mark.args[0] for mark in item.iter_markers('sweep')]
        n = min(every, default=1)   # a single case may be left to CI
        if n and seen[name] % n == 0: chosen.append(item)
        seen[name] += 1
    return chosen


class Results:
    "A plugin of pytest: leaves tests out, notes what became of the others"
    def __init__(self, left_out, opened):
        self.left_out = left_out    # {id: outcome}
        self.left_to_ci = {}
        self.opened = opened
        self.tests, self.seconds = {}, {}

    def pytest_collection_modifyitems(self, config, items):
        changed = [i for i in items if i.nodeid not in self.left_out]
        tell({i.nodeid: self.left_out[i.nodeid] for i in items if i.nodeid in self.left_out})
        drawn = items if RUN_ALL else sample(items)
        chosen = [i for i in changed if i in drawn]
        self.left_to_ci = {i.nodeid: 'left' for i in changed if i not in drawn}
        tell(self.left_to_ci)
        config.hook.pytest_deselected(items=[i for i in items if i not in chosen])
        items[:] = chosen
        for item in items: item.user_properties.append(('stems', stems_of(item)))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item): self.opened.clear()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item):
        "A test that names chapters and reads another notebook would be left out when that changes; headings of all count"
        yield
        named = stems_of(item)
        others = [p for p in self.opened if named and p.startswith('nbs/') and U.CHAPTER.match(p) and Path(p).stem not in named]
        if others: pytest.fail(f'It reads {min(others)}: name it in @pytest.mark.chapters, or no chapter.')

    def pytest_runtest_logreport(self, report):
        name, outcome = report.nodeid, report.outcome
        self.seconds[name] = self.seconds.get(name, 0) + report.duration
        if outcome == 'rerun' or report.when != 'call' and outcome == 'passed': return
        if self.tests.get(name, [''])[0] == 'failed': return    # its teardown, which comes later
        if outcome == 'skipped' and 'there is no Chromium' in str(report.longrepr): outcome = 'browser'
        self.tests[name] = outcome, dict(report.user_properties)['stems']
        tell({name: outcome})


# --- processes ---

def serve(listener):
    "Fork what `ranks` in conftest asks for, from a process that has imported torch and trained nothing"
    while True:
        client, _ = listener.accept()
        if os.fork() == 0: break
        client.close()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]: pass
    order = json.loads(client.makefile().readline())
    os.environ.clear()
    os.environ.update(order['env'])
    forget_the_project()
    hand_on(order['env'].get('MPCOURSE_READS'))
    children = [fork_rank(code, folder) for code, folder in order['ranks']]
    codes = {}
    signal.signal(signal.SIGALRM, lambda *_: [os.kill(c, signal.SIGKILL) for c in children if c not in codes])
    signal.alarm(order['timeout'])
    for child in children: codes[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    client.sendall(json.dumps([codes[child] for child in children]).encode())
    os._exit(0)


def fork_rank(code, errors):
    "A child that runs code as `python -c` would"
    child = os.fork()
    if child: return child
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    status = 1
    try:
        exec(compile(code, '<string>', 'exec'), {'__name__': '__main__'})
        status = 0
    except BaseException: traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)


def start_server(folder):
    "A process that forks for the tests, and its address in the environment"
    listener = socket.socket(socket.AF_UNIX)
    os.environ['MPCOURSE_FORKS'] = f'{folder}/forks'
    listener.bind(os.environ['MPCOURSE_FORKS'])
    listener.listen()
    server = os.fork()
    if server == 0:
        try: serve(listener)
        except BaseException: os._exit(1)
    listener.close()
    return server

def hand_on(notes):
    "Note what this process and its children open from now on; returns a set of it that may be emptied"
    os.environ |= {'MPCOURSE_READS': str(notes), 'MPCOURSE_READER': str(ROOT/'tests/reads.py')}
    import reads
    return reads.opened


def forget_the_project():
    "Modules that this process has for itself are imported again, so that it is noted who needs them"
    for name, module in list(sys.modules.items()):
        if name != '__main__' and str(getattr(module, '__file__', '')).startswith(f'{ROOT}{os.sep}') and '.venv' not in module.__file__:
            del sys.modules[name]


def run_file(file, left_out, options, folder):
    "Run one file in this process, write what became of it, and leave"
    log = os.open(folder/'log', os.O_WRONLY | os.O_CREAT)
    for standard in 1, 2: os.dup2(log, standard)
    forget_the_project()
    sys.modules['__main__'] = ModuleType('__main__')    # a spawned process would import this file
    results = Results(left_out, hand_on(folder/'notes'))
    code = pytest.main(['-p', 'no:cacheprovider', '-p', 'no:xdist', '-W', 'ignore::pytest.PytestAssertRewriteWarning', *options, file], plugins=[results])
    (folder/'results.json').write_text(json.dumps([int(code), results.tests, results.seconds, results.left_to_ci]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def fork(job, folder):
    "The process that runs a file"
    child = os.fork()
    if child: return child
    try: run_file(*job, folder)
    except BaseException as e: os.write(2, f'{type(e).__name__}: {e}'.encode())
    os._exit(1)


def finish(job, folder, old, started, seconds):
    "Tell what became of a file, and what to keep of it"
    file, _, options = job
    log = (folder/'log').read_text(errors='replace')
    done = folder/'results.json'
    code, tests, slow, left = json.loads(done.read_text()) if done.exists() else [-1, {}, {}, {}]
    bad = [name for name, (outcome, _) in tests.items() if outcome == 'failed']
    fine = code in (0, 5) or code == 1 and bad
    if not fine:
        tell({file: 'failed'})
        print(f'FAILED: {file} broke off')
    counts = Counter(outcome for outcome, _ in tests.values())
    print(log if bad or not fine else f'{file}: {", ".join(f"{n} {outcome}" for outcome, n in counts.items())} in {sum(slow.values()):.0f} s', flush=True)
    seconds.update(slow)
    if not fine or options: return None
    entry = U.entry_of(old, U.reads_of((folder/'notes').read_text()), tests, started)
    return entry and entry | dict(left=left)


def jobs(files, options, green):
    "The files with something to run, the longest first: (file, tests to leave out, options)"
    todo = []
    for file in files:
        entry = green.get(file)
        left = U.unchanged(entry) if entry and not options and not RUN_ALL else {}
        if left and U.stamp(entry['reads']) == entry['stamp']:
            tell(left | entry['left'])
        else: todo.append((file, left, options))
    def seconds(job):
        name = Path(job[0]).stem.removeprefix('test_')
        return green.get(job[0], {}).get('seconds', 100 if name in LONG else 10)
    return sorted(todo, key=seconds, reverse=True)


def run(todo, green, workers):
    "Run the jobs, some at a time"
    started, running, seconds = time.time(), {}, {}
    if len(todo) > workers:
        for name in PACKAGES:
            with suppress(ImportError): importlib.import_module(name)
    gc.freeze()     # else each child's collector goes over all packages
    with tempfile.TemporaryDirectory() as tmp:
        todo = list(todo)
        server = start_server(tmp)
        while todo or running:
            while todo and len(running) < workers:
                job, folder = todo.pop(0), Path(tempfile.mkdtemp(dir=tmp))
                running[fork(job, folder)] = job, folder, time.time()
            pid, _ = os.wait()
            if pid == server: raise RuntimeError('the process that forks ended')
            job, folder, began = running.pop(pid)
            old = green.get(job[0])
            entry = finish(job, folder, old, started, seconds)
            if entry: entry['seconds'] = max(time.time() - began, (old or {}).get('seconds', 0) if job[1] else 0)
            if not job[2]: U.keep({job[0]: entry})
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
    return seconds


def main(args):
    "Run what has to be run; returns nothing, since MPCOURSE_REPORT tells what failed"
    workers = int(args.pop(0)[2:]) if args[:1] and args[0].startswith('-n') else os.cpu_count() or 2
    wrong = [a for a in args if '::' in a or a.isdigit()]
    if wrong: raise SystemExit(f'{wrong[0]}: give whole files, options as -k=name, and workers as -n4; for one test run pytest itself.')
    files = [a for a in args if a.endswith('.py') and not a.startswith('-')]
    options = [a for a in args if a not in files]
    if not files: files = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT/'tests').rglob('test_*.py'))
    os.chdir(ROOT)
    trace = "import os; p = os.environ.get('MPCOURSE_READER'); p and exec(open(p).read(), {'__name__': 'reads', '__file__': p})\n"
    Path(sysconfig.get_path('purelib'), 'mpcourse_reads.pth').write_text(trace)
    U.environment()     # before an import changes it
    green = U.kept()
    seconds = run(jobs(files, options, green), green, workers)
    slowest = sorted(seconds, key=seconds.get, reverse=True)[:SLOWEST]
    for name in slowest: print(f'{seconds[name]:6.1f} s  {name}')


if __name__ == '__main__': main(sys.argv[1:])
