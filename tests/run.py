"""What `make test` runs: every stage, whatever became of the one before; ends with one line of counts.

    python tests/run.py              all stages
    python tests/run.py lint pytest  some of them
"""
import configparser, filecmp, hashlib, json, os, shutil, signal, subprocess, sys, tempfile, time
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
LIBENV = ROOT/'.venv-library'
CHKSTYLE_IGNORE = 'continuation-indent,semicolon,dict-literal,single-statement-body,inefficient-multiline-expression'


@dataclass
class Counts:
    "How many checks passed, failed and were skipped"
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, o): return Counts(self.passed + o.passed, self.failed + o.failed, self.skipped + o.skipped)
    def __str__(self): return f'{self.passed} passed, {self.failed} failed, {self.skipped} skipped'


def environment(**more):
    "One thread per process, no colours, and a word to the tests that the pages are fresh"
    one = {f'{v}_NUM_THREADS': '1' for v in ('OMP', 'MKL', 'OPENBLAS')}
    return {**os.environ, **one, 'MPCOURSE_TEST': '1', 'PIP_DISABLE_PIP_VERSION_CHECK': '1', 'NO_COLOR': '1', **more}


def sh(*cmd, timeout, cwd=ROOT, **env):
    "Run a command with a time limit that also ends its children; returns its exit code"
    p = subprocess.Popen([str(c) for c in cmd], cwd=cwd, env=environment(**env), start_new_session=True)
    try: return p.wait(timeout)
    except BaseException as e:
        os.killpg(p.pid, signal.SIGKILL); p.wait()
        if not isinstance(e, subprocess.TimeoutExpired): raise
        print(f'{Path(cmd[0]).name} was stopped after {timeout} s')
        return 124


def check(what, ok):
    "Count one check, and say what failed"
    if not ok: print(f'FAILED: {what}')
    return Counts(passed=int(bool(ok)), failed=int(not ok))


def copy_project(tmp):
    "What nbdev needs, in a folder of its own"
    for f in ('settings.ini', 'setup.py', 'pyproject.toml', '_quarto.yml', 'README.md'):
        if (ROOT/f).exists(): shutil.copy(ROOT/f, tmp)
    shutil.copytree(ROOT/'nbs', tmp/'nbs', symlinks=True, ignore=shutil.ignore_patterns('.ipynb_checkpoints', '_*'))
    (tmp/'mpcourse').mkdir()
    return tmp


def in_sync(tmp):
    "Whether the package is what the notebooks export, no file more or less"
    code = sh(BIN/'nbdev_export', timeout=300, cwd=tmp)
    new, old = ({p.name for p in (d/'mpcourse').glob('*.py')} for d in (tmp, ROOT))
    differ = sorted(n for n in new | old if n not in new & old or not filecmp.cmp(tmp/'mpcourse'/n, ROOT/'mpcourse'/n, shallow=False))
    for n in differ: print(f'mpcourse/{n} is not what the notebooks export: run nbdev_export')
    return check('the package is what the notebooks export', code == 0 and not differ)


def are_clean(tmp):
    "Whether nbdev_clean would change a notebook, and whether one but the index carries outputs"
    code, res = sh(BIN/'nbdev_clean', timeout=300, cwd=tmp), Counts()
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
    "ruff on Python files, fastaistyle on notebooks"
    # F811: @patch gives methods of one name to several classes; test_structure finds those given twice to one
    ruff = sh(BIN/'ruff', 'check', '--no-cache', '--select', 'F,E9', '--per-file-ignores', 'mpcourse/*.py:F811', 'mpcourse', 'tests', 'bench', 'studies', '.ci', 'setup.py', timeout=120)
    style = sh(BIN/'chkstyle', '--ignore', CHKSTYLE_IGNORE, 'nbs', timeout=120)
    return check('ruff finds nothing', ruff == 0) + check('chkstyle finds nothing in the notebooks', style == 0)


def course():
    "Every notebook once, in a fresh kernel, into _course/"
    with tempfile.TemporaryDirectory() as tmp:
        report = Path(tmp)/'outcomes.json'
        code = ("import json, sys; from mpcourse.course import run_course; "
                "json.dump([o.status for o in run_course(out='_course')], open(sys.argv[1], 'w'))")
        rc = sh(sys.executable, '-c', code, report, timeout=1200)
        if rc or not report.exists(): return check('the course runs', False)
        status = json.loads(report.read_text())
        return Counts(status.count('ok'), len(status) - status.count('ok')) + check('there are chapters', status)


def pytest(python, *args, timeout):
    "Run pytest and read its counts from the report that it writes"
    with tempfile.TemporaryDirectory() as tmp:
        report = Path(tmp)/'junit.xml'
        rc = sh(python, '-m', 'pytest', '-p', 'no:cacheprovider', f'--junitxml={report}', *args, timeout=timeout)
        if not report.exists(): return check(f'pytest ended with code {rc} and without a report', False)
        suites = list(ET.parse(report).getroot().iter('testsuite'))
        total, bad, skipped = (sum(int(s.get(k, 0)) for s in suites for k in keys.split()) for keys in ('tests', 'failures errors', 'skipped'))
        res = Counts(total - bad - skipped, bad, skipped)
        return res if rc in (0, 1) and bool(rc) == bool(bad) else res + check(f'pytest ended with code {rc}', False)


def tests():
    "Everything under tests/"
    return pytest(sys.executable, 'tests', '--durations=8', timeout=1200)


def torch_bound():
    "The requirement that keeps pip from fetching another torch"
    cfg = configparser.ConfigParser(delimiters=['='])
    cfg.read(ROOT/'settings.ini', encoding='utf-8')
    return next(r for r in cfg['DEFAULT']['requirements'].split() if r.startswith('torch>'))


def library_env():
    "A second environment with the newest fastai and fastcore, in which nbdev 2 could not live; made once"
    stamp = LIBENV/'.installed'
    want = hashlib.sha256((ROOT/'settings.ini').read_bytes() + Path(__file__).read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == want: return True
    print('Installing the newest fastai and fastcore into .venv-library; the first time this takes a few minutes.')
    python = LIBENV/'bin/python'
    if not python.exists() and sh(sys.executable, '-m', 'venv', LIBENV, timeout=120): return False
    wanted = [torch_bound(), 'fastai', 'fastcore', 'pytest', 'pytest-timeout', 'pytest-rerunfailures', 'hypothesis', 'ml_dtypes', 'gfloat', 'scikit-learn', 'tensorboard']
    if sh(python, '-m', 'pip', 'install', '-qq', '--upgrade', *wanted, '-e', ROOT, timeout=900): return False
    stamp.write_text(want)
    return True


def library():
    "The tests of the library once more, beside the newest fastai and fastcore"
    if not library_env(): return check('.venv-library installs', False)
    return pytest(LIBENV/'bin/python', 'tests', '-m', 'library', timeout=900)


def chromium():
    "Whether there is a browser for the browser tests"
    return any(shutil.which(n) for n in ('chromium', 'chromium-browser', 'google-chrome'))


STAGES = [exports, lint, course, tests, library]


def run(stage):
    "Run a stage, come what may"
    print(f'\n== {stage.__name__}: {stage.__doc__[0].lower()}{stage.__doc__[1:]}', flush=True)
    start = time.time()
    try: res = stage()
    except Exception as e:
        print(f'{type(e).__name__}: {e}')
        res = check(f'the stage {stage.__name__} ran to its end', False)
    print(f'== {stage.__name__}: {res} in {time.time() - start:.0f} s', flush=True)
    return res


def main(names):
    "Run the stages named, or all; returns the exit code"
    unknown = set(names) - {s.__name__ for s in STAGES}
    if unknown: sys.exit(f'There is no stage {", ".join(sorted(unknown))}: there are {", ".join(s.__name__ for s in STAGES)}.')
    total = sum((run(s) for s in STAGES if not names or s.__name__ in names), Counts())
    print()
    if not chromium():
        print('There is no Chromium here, so the browser tests were skipped.')
        if os.environ.get('CI') == 'true': total += check('CI has a Chromium: .ci/run installs one', False)
    print(total)
    return int(total.failed > 0)


if __name__ == '__main__': sys.exit(main(sys.argv[1:]))
