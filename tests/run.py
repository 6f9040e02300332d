"""What `make test` runs: every stage, whatever became of the one before; ends with one line of counts.

    python tests/run.py             all stages
    python tests/run.py lint tests  some of them

CI, and ALL=1, run every stage, chapter and test. Otherwise those are left out that went well before with the same files
(`unchanged.py`), the second environment, and most cases of the tests marked `sweep`; the last line says so.
"""
import configparser, filecmp, hashlib, importlib, json, operator, os, re, shutil, signal, subprocess, sys, tempfile, time
from dataclasses import astuple, dataclass
from pathlib import Path

import chromium
import unchanged as U

ROOT = U.ROOT
BIN = Path(sys.executable).parent
LIBENV = ROOT/'.venv-library'
IN_CI = os.environ.get('CI') == 'true'
RUN_ALL = IN_CI or bool(os.environ.get('ALL'))
# tests of what another fastai could break, beside the promises
FASTAI = 'callback monitor checkpoint accumulate'.split()
CHKSTYLE_IGNORE = 'continuation-indent,semicolon,dict-literal,single-statement-body,inefficient-multiline-expression'


@dataclass
class Counts:
    "How many checks passed, failed, were skipped, had passed before with the same files, and are for CI alone"
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    unchanged: int = 0
    left: int = 0
    browser: int = 0    # skipped for want of one

    def __add__(self, o): return Counts(*map(operator.add, astuple(self), astuple(o)))
    def __str__(self):
        text = f'{self.passed} passed, {self.failed} failed, {self.skipped + self.browser} skipped'
        if self.unchanged: text += f', {self.unchanged} unchanged since they passed'
        return text + (f', {self.left} left to CI' if self.left else '')


def environment(**more):
    "One thread per process, no colours, and a variable that tells the tests that the pages are fresh"
    one = {f'{v}_NUM_THREADS': '1' for v in ('OMP', 'MKL', 'OPENBLAS')}
    return {**os.environ, **one, 'MPCOURSE_TEST': '1', 'PIP_DISABLE_PIP_VERSION_CHECK': '1',
            'NO_COLOR': '1', **more}


def sh(*cmd, cwd=ROOT, **env):
    "Run a command and return its exit code. It has no time limit, since single tests and cells have theirs"
    p = subprocess.Popen([str(c) for c in cmd], cwd=cwd, env=environment(**env),
                         start_new_session=True)
    try: return p.wait()
    except BaseException:
        os.killpg(p.pid, signal.SIGKILL)
        raise


def check(what, ok):
    "Count one check, and say what failed"
    if not ok: print(f'FAILED: {what}')
    return Counts(passed=int(bool(ok)), failed=int(not ok))


def copy_project(tmp):
    "What nbdev needs, in a folder of its own"
    for f in ('settings.ini', 'setup.py', 'pyproject.toml', '_quarto.yml', 'README.md'):
        if (ROOT/f).exists(): shutil.copy(ROOT/f, tmp)
    shutil.copytree(ROOT/'nbs', tmp/'nbs', symlinks=True,
                    ignore=shutil.ignore_patterns('.ipynb_checkpoints', '_*'))
    (tmp/'mpcourse').mkdir()
    # written by hand: nbdev only sets its version
    shutil.copy(ROOT/'mpcourse/__init__.py', tmp/'mpcourse')
    return tmp


def in_sync(tmp):
    "Whether the package is what the notebooks export, no file more or less"
    code = sh(BIN/'python', ROOT/'tools/export.py', cwd=tmp)
    new, old = ({p.name for p in (d/'mpcourse').glob('*.py')} for d in (tmp, ROOT))
    differ = sorted(n for n in new | old if n not in new & old
                    or not filecmp.cmp(tmp/'mpcourse'/n, ROOT/'mpcourse'/n, shallow=False))
    for n in differ:
        print(f'mpcourse/{n} differs from what the notebooks export: run make export.')
    return check('the package is what the notebooks export', code == 0 and not differ)


def are_clean(tmp):
    "Whether nbdev_clean would change a notebook, and whether one but the index carries outputs"
    code, res = sh(BIN/'nbdev_clean', cwd=tmp), Counts()
    for p in sorted((ROOT/'nbs').glob('*.ipynb')):
        same = filecmp.cmp(p, tmp/'nbs'/p.name, shallow=False)
        outputs = p.name != 'index.ipynb' and any(c.get('outputs') for c in json.loads(p.read_text(encoding='utf-8'))['cells'])
        res += check(f'{p.name} is clean: run nbdev_clean', code == 0 and same)
        res += check(f'{p.name} carries no outputs', not outputs)
    return res


def exports():
    "The package is what the notebooks export, and the notebooks are clean"
    with tempfile.TemporaryDirectory() as tmp:
        tmp = copy_project(Path(tmp))
        return in_sync(tmp) + are_clean(tmp)


def lint():
    "ruff on Python files"
    python = [d for d in ('mpcourse', 'tests', 'bench', 'tools', 'studies', 'setup.py')
              if (ROOT/d).exists()]
    # F811: @patch gives methods of one name to several classes; test_structure finds those given twice to one
    ruff = sh(BIN/'ruff', 'check', '--no-cache', '--select', 'F,E9', '--per-file-ignores',
              'mpcourse/*.py:F811', *python)
    return check('ruff finds nothing', ruff == 0)


def types():
    "basedpyright finds every public name, and no error in the front page's code"
    blocks = re.findall(r'```python\n(.*?)```', (ROOT/'README.md').read_text(encoding='utf-8'),
                        re.S)
    names = f'from mpcourse import {", ".join(importlib.import_module("mpcourse").__all__)}'
    with tempfile.TemporaryDirectory() as tmp:
        (Path(tmp)/'names.py').write_text(names)
        (Path(tmp)/'readme.py').write_text('\n'.join(blocks), encoding='utf-8')
        found = sh(BIN/'basedpyright', '--pythonpath', sys.executable, '--level', 'error', tmp,
                   cwd=tmp, PYTHONPATH=str(ROOT))
    clean = check('basedpyright finds nothing', found == 0)
    return check('the front page has code', blocks) + clean


def course():
    "Run every notebook in a fresh kernel into _course/, or only those whose text or code has changed"
    with tempfile.TemporaryDirectory() as tmp:
        report = Path(tmp)/'outcomes.json'
        code = ("import json, sys; from tools.course import run_course; "
                "json.dump([o.status for o in run_course(changed=sys.argv[2] == 'changed')], open(sys.argv[1], 'w'))")
        rc = sh(sys.executable, '-c', code, report, 'all' if RUN_ALL else 'changed')
        if rc or not report.exists(): return check('the course runs', False)
        status = json.loads(report.read_text())
        return Counts(status.count('ok'), len(status) - status.count('ok'))


def pytest(python, *args):
    "Run the tests that `suite.py` does not leave out, and count them as far as they came"
    with tempfile.TemporaryDirectory() as tmp:
        report = Path(tmp)/'outcomes.txt'
        rc = sh(python, ROOT/'tests/suite.py', *args, MPCOURSE_REPORT=str(report))
        seen = [line.split()[0] for line in report.read_text().splitlines()] if report.exists() else []
    res = Counts(*(seen.count(o) for o in ('passed', 'failed', 'skipped', 'unchanged', 'left', 'browser')))
    return res if rc == 0 else res + check(f'tests/suite.py ended with code {rc}', False)


def tests():
    "Everything under tests/"
    return pytest(sys.executable)


def torch_bound():
    "The requirement that keeps pip from fetching another torch"
    cfg = configparser.ConfigParser(delimiters=['='])
    cfg.read(ROOT/'settings.ini', encoding='utf-8')
    return next(r for r in cfg['DEFAULT']['dev_requirements'].split() if r.startswith('torch<'))


def library_env():
    "A second environment with the newest fastai and fastcore, in which nbdev 2 could not live; made once"
    stamp = LIBENV/'.installed'
    want = hashlib.sha256((ROOT/'settings.ini').read_bytes() + Path(__file__).read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == want: return True
    print('Installing the newest fastai and fastcore into .venv-library, which takes a few minutes the first time.')
    python = LIBENV/'bin/python'
    if not python.exists() and sh(sys.executable, '-m', 'venv', LIBENV): return False
    wanted = [torch_bound(), 'fastai', 'fastcore', 'pytest', 'pytest-timeout',
              'pytest-rerunfailures', 'pytest-xdist', 'hypothesis', 'ml_dtypes', 'gfloat', 'scikit-learn',
              'tensorboard', 'fastaistyle>=0.0.20', 'pandas', 'matplotlib', 'ipywidgets']
    # of CPU builds; alone, so that no other package comes from it
    index = os.environ.get('TORCH_INDEX')
    if index and sh(python, '-m', 'pip', 'install', '-qq', '--index-url', index, torch_bound()):
        return False
    if sh(python, '-m', 'pip', 'install', '-qq', '--upgrade', *wanted, '-e', ROOT): return False
    stamp.write_text(want)
    return True


def findings():
    "The findings of fastaistyle in the notebooks, except in stubs of exercises; a line of code for each"
    command = [LIBENV/'bin/chkstyle', '--ignore', CHKSTYLE_IGNORE, 'nbs']
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder)/'nbs').mkdir()
        for p in (ROOT/'nbs').glob('*.ipynb'):    # a checker is a function, and no example
            nb = json.loads(p.read_text(encoding='utf-8'))
            for c in nb['cells']:
                if any(l.startswith('def check_') for l in c['source']):
                    c['source'] = ['#| export\n', *c['source']]
                # which it does not know
                c['source'] = [re.sub(r'^#\| *exporti\b', '#| export', l) for l in c['source']]
            (Path(folder)/'nbs'/p.name).write_text(json.dumps(nb), encoding='utf-8')
        r = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)
    lines = r.stdout.splitlines()
    return [what for what, code in zip(lines, lines[1:]) if what.startswith('# nbs/')
            and code != '# your turn:']


def style():
    "fastaistyle on the notebooks: its findings may only become fewer (its notebook rules need fastcore 2, so it lives beside the newest fastai)"
    if not library_env(): return check('.venv-library installs', False)
    found, most = findings(), json.loads((ROOT/'tests/style.json').read_text())['findings']
    print(f'{len(found)} findings, {most} allowed')
    if len(found) > most: print(*found, sep='\n')
    return check('fastaistyle finds something', found) + check('no more findings than tests/style.json allows: mend those in the cells that you changed', len(found) <= most)


def library():
    "Run what uses fastai again with the newest fastai and fastcore (torch and its arithmetic are the same)"
    if not library_env(): return check('.venv-library installs', False)
    alone = '-k', 'not rank and not process and not killed' # these have run with the other tests
    promised = [f'tests/promises/test_{name}.py' for name in ('1_no_nan', '2_fp32', '3_resume')]
    rest = [f'tests/test_{name}.py' for name in FASTAI]
    python = LIBENV/'bin/python'
    return pytest(python, *promised, *alone) + pytest(python, *rest, '-m', 'library', *alone)


STAGES = [exports, lint, types, course, tests, library, style]
IN_CI_ONLY = library, style
READS = {exports: ('nbs/', 'mpcourse/', 'settings.ini', 'setup.py', 'pyproject.toml', '_quarto.yml', 'README.md', 'tests/run.py'),
         types: ('mpcourse/', 'README.md', 'tests/run.py')}


def run_if_changed(stage):
    "Run a stage, if it did not go well with the files of today"
    if stage not in READS: return stage()
    reads = {name: 'r' for name in U.names() if name.startswith(READS[stage])}
    entry, stamp = U.kept().get(stage.__name__), U.stamp(reads)
    if not RUN_ALL and entry and entry['stamp'] == stamp: return Counts(unchanged=entry['passed'])
    res = stage()
    U.keep({stage.__name__: None if res.failed else dict(stamp=stamp, passed=res.passed)})
    return res


def run(stage):
    "Run a stage, and report an exception as a failed check"
    print(f'\n== {stage.__name__}: {stage.__doc__[0].lower()}{stage.__doc__[1:]}', flush=True)
    start = time.time()
    try: res = run_if_changed(stage)
    except Exception as e:
        print(f'{type(e).__name__}: {e}')
        res = check(f'the stage {stage.__name__} ran to its end', False)
    print(f'== {stage.__name__}: {res} in {time.time() - start:.0f} s', flush=True)
    return res


def main(names):
    "Run the stages named, or all; returns the exit code"
    unknown = set(names) - {s.__name__ for s in STAGES}
    if unknown:
        sys.exit(f'There is no stage {", ".join(sorted(unknown))}: take some of {", ".join(s.__name__ for s in STAGES)}.')
    chosen = [s for s in STAGES if s.__name__ in names or not names and (RUN_ALL or s not in IN_CI_ONLY)]
    missing = chromium.install() if tests in chosen and not chromium.find() else ''
    total = sum(map(run, chosen), Counts())
    if missing and IN_CI: total += check('CI has a Chromium: .ci/run installs one', False)
    print(f'\n{total}')
    if total.browser:
        print(f'Not tried: {total.browser} tests in a browser, since there is none and {missing}. Install Chromium, and run this again.')
    if not RUN_ALL and not names:
        print(f'Left to CI, or make test ALL=1: {total.left} cases of long tests, and the newest fastai ({", ".join(s.__name__ for s in IN_CI_ONLY)}).')
    return int(total.failed > 0)


if __name__ == '__main__': sys.exit(main(sys.argv[1:]))
