"""Leaves out tests that passed before with the same code: `make test` uses it, CI does not.

A test is its file, the test files that this names, and everything else in the project and its environment but the chapters.
A test marked `chapters` is the chapters, their pages and texts such as README, too: all of them, or those that
the mark or a parameter names. `.green.json` keeps a fingerprint of each test that passed."""
import importlib.metadata, json, os, re, sys
from functools import cache

from tools.notebooks import ROOT, bare, digest, read_text

GREEN = ROOT/'.green.json'
FOLDERS = '.ci', '.github', 'bench', 'mpcourse', 'nbs', 'studies', 'tests', 'tools'
NBS = sorted((ROOT/'nbs').glob('*.ipynb'))
TESTS = {p.stem: p for p in (ROOT/'tests').rglob('test_*.py')}
TEXTS = sorted([*ROOT.glob('*.md'), *(ROOT/'tests').glob('*.md')])
MADE = re.compile(r'__pycache__|_checkpoints|\.partial\.|\.tmp$')


# --- fingerprints ---

@cache
def fingerprint(path):
    "Of a file; of a module, what runs"
    if not path.exists(): return ''
    if path.suffix == '.py' and path.parent.name == 'mpcourse': return digest(bare(read_text(path)))
    return digest(path.read_bytes().hex(), str(path.stat().st_mode))


@cache
def everything_else():
    "Of Python, the packages here, and all files but tests, chapters and texts"
    files = [p for p in ROOT.iterdir() if not p.name.startswith('.')]
    for folder in FOLDERS: files += (ROOT/folder).rglob('*')
    others = set(files) - {*NBS, *TEXTS, *TESTS.values()}
    others = sorted(p for p in others if p.is_file() and not MADE.search(str(p)))
    names = [p.relative_to(ROOT).as_posix() for p in others]
    packages = sorted({f'{d.name} {d.version}' for d in importlib.metadata.distributions()})
    return digest(sys.version, *packages, *names, *map(fingerprint, others))


@cache
def test_files(path):
    "Of a file of tests, and those that it names"
    files, todo = set(), [path]
    while todo:
        file = todo.pop()
        if file in files: continue
        files.add(file)
        text = read_text(file)
        todo += [TESTS[word] for word in re.findall(r'\btest_\w+', text) if word in TESTS]
        if 'mission.md' in text: todo += TESTS.values()     # which names tests of all files
    return digest(*map(fingerprint, sorted(files)))


@cache
def headings():
    "Of all chapters' headings, to which pages link"
    return digest(*(line for p in NBS for line in re.findall(r'^ *"#+ .*', read_text(p), re.M)))


@cache
def chapters(stems):
    "Of chapters with their pages, and of all texts"
    files = [f for stem in stems for f in (ROOT/f'nbs/{stem}.ipynb', ROOT/f'_course/{stem}.html')]
    return digest(headings(), *map(fingerprint, [*files, *TEXTS]))


def chapters_of(item):
    "The stems of the chapters that a test reads"
    known = {p.stem for p in NBS}
    marks = list(item.iter_markers('chapters'))
    params = item.callspec.params.values() if hasattr(item, 'callspec') else []
    named = {str(getattr(p, 'stem', p)) for p in params}.union(*(mark.args for mark in marks))
    if named & known: return tuple(sorted(named & known))
    return tuple(sorted(known)) if marks else ()


def stamp(item):
    "The fingerprint of a test"
    stems = chapters_of(item)
    return digest(everything_else(), test_files(item.path), chapters(stems) if stems else '')


# --- hooks of pytest ---

def kept():
    "The fingerprints of tests that passed, by environment and test"
    return json.loads(GREEN.read_text()) if GREEN.exists() else {}


def pytest_collection_modifyitems(config, items):
    "Leave out those that passed with the fingerprint that they have now"
    green = kept().get(sys.prefix, {})
    changed, same = [], []
    for item in items:
        now = stamp(item)
        item.user_properties.append(('stamp', now))
        (same if green.get(item.nodeid) == now else changed).append(item)
    items[:] = changed
    config.hook.pytest_deselected(items=same)
    if os.environ.get('PYTEST_XDIST_WORKER', 'gw0') != 'gw0': return     # all workers find the same
    with open(os.environ['MPCOURSE_REPORT'], 'a') as f: f.write('unchanged\n'*len(same))


passed = {}


def pytest_runtest_logreport(report):
    "Note the fingerprint of a test that passed"
    if report.outcome == 'failed': passed.pop(report.nodeid, None)
    elif report.when == 'call' and report.outcome == 'passed':
        passed[report.nodeid] = dict(report.user_properties)['stamp']


def pytest_sessionfinish(session):
    "Write them down, once"
    if 'PYTEST_XDIST_WORKER' in os.environ: return
    green = kept()
    green[sys.prefix] = {**green.get(sys.prefix, {}), **passed}
    GREEN.write_text(json.dumps(green, indent=0))
