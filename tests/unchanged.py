"""What passed before, and with which files: `make test` leaves that out.

`.green.json` keeps for each file of tests every file of the project that its process and its children opened (`reads.py`),
and for each test a fingerprint of these, of the names of all files, and of the environment. A test that names chapters
(`@pytest.mark.chapters('09_step')`, or a parameter) is not run again for a word in another one."""
import ast, hashlib, json, os, re, shutil, sys, sysconfig
from functools import cache
from pathlib import Path

import chromium

ROOT = Path(__file__).resolve().parent.parent
GREEN = ROOT/'.green.json'
FOLDERS = '.ci', '.github', 'bench', 'mpcourse', 'nbs', 'studies', 'tests', 'tools', '_course'
MADE = re.compile(r'__pycache__|_checkpoints|\.partial\.|\.tmp$|tests/(promises/)?test_\w+\.py$|_course/.*(?<!\.html)$')
CHAPTER = re.compile(r'(?:nbs|_course)/(\w+)\.(?:ipynb|html)$')
SETTINGS = re.compile(r'MPCOURSE_(?!READ|REPORT|FORKS)|FUZZ|PYTHON|TORCH_|CUDA|OMP_|MKL_|OPENBLAS|ATEN|DNNL|ONEDNN|NUMEXPR')
# what programs other than Python read of the project; others may have read everything
PROGRAMS = {'node': ('mpcourse/live/', 'tests/live.mjs'), 'python -S': ('mpcourse/',), 'make': ('Makefile', 'settings.ini')}
PROGRAMS |= dict.fromkeys('npm git uname lscpu lsb_release ldconfig rustc ps gcc g++ mount umount'.split(), ())


# --- fingerprints ---

def digest(*parts): return hashlib.sha256('\0'.join(parts).encode()).hexdigest()[:12]


@cache
def fingerprint(path, imported=False):
    "Of a file; of a module that is only imported, what runs, which a comment is not"
    file = ROOT/path
    if not file.is_file(): return ''
    if imported: return digest(ast.dump(ast.parse(file.read_bytes())))
    return digest(file.read_bytes().hex(), str(file.stat().st_mode))


@cache
def names():
    "All files but those of tests, which come and go without the others, and what is made"
    files = [p for p in ROOT.iterdir() if not p.name.startswith('.')]
    for folder in FOLDERS: files += (ROOT/folder).rglob('*')
    found = (p.relative_to(ROOT).as_posix() for p in files if p.is_file())
    return sorted(name for name in found if not MADE.search(name))


@cache
def environment():
    "Python, the packages, the processor, a browser, and the variables that reach arithmetic or tests"
    packages = sorted(p.name for p in Path(sysconfig.get_path('purelib')).glob('*.dist-info'))
    cpu = Path('/proc/cpuinfo')
    processor = re.findall(r'^(?:model name|flags|CPU part)\s*: (.*)', cpu.read_text(), re.M)[:2] if cpu.exists() else []
    settings = [f'{k}={v}' for k, v in sorted(os.environ.items()) if SETTINGS.match(k)]
    programs = [str(p) for p in (chromium.find(), *map(shutil.which, ('node', 'quarto'))) if p]
    programs += [f'{os.stat(p).st_size} {os.stat(p).st_mtime}' for p in programs]
    gpu = str(Path('/dev/nvidia0').exists())
    return digest(sys.version, *packages, *processor, *settings, *programs, gpu, *names())


@cache
def headings():
    "Of all chapters' headings, to which pages link"
    cells = [c for p in sorted((ROOT/'nbs').glob('*.ipynb')) for c in json.loads(p.read_bytes())['cells']]
    texts = (''.join(c['source']) for c in cells if c['cell_type'] == 'markdown')
    return digest(*(line for text in texts for line in text.splitlines() if line.startswith('#')))


def stamp(reads, stems=None):
    "Of the files that were read; without the chapters that a test does not name, if it names some"
    parts = [environment()]
    for path, kind in sorted(reads.items()):
        chapter = CHAPTER.match(path)
        if stems and chapter and chapter[1] not in stems: continue
        parts.append(f'{path} {fingerprint(path, kind == "i")}')
    if stems: parts.append(headings())
    return digest(*parts)


# --- what is kept ---

def kept():
    "What passed in this environment: {file of tests: its reads, its stamp, its tests}"
    return all_kept().get(sys.prefix, {})


def all_kept():
    "The same for every environment; nothing if the file was cut off"
    try: return json.loads(GREEN.read_text())
    except (FileNotFoundError, ValueError): return {}


def keep(entries):
    "Write down what became of some files of tests, or of stages"
    green = all_kept()
    mine = {**green.get(sys.prefix, {}), **entries}
    green[sys.prefix] = {name: entry for name, entry in mine.items() if entry}
    new = GREEN.with_name(f'{GREEN.name}.{os.getpid()}')
    new.write_text(json.dumps(green))
    os.replace(new, GREEN)


def unchanged(entry):
    "The tests of a file that passed, or were skipped, with the files of today: {id: what to count}"
    stamps = cache(lambda stems: stamp(entry['reads'], stems))
    same = [name for name, (_, stems, then) in entry['tests'].items() if stamps(tuple(stems)) == then]
    return {name: 'unchanged' if entry['tests'][name][0] == 'passed' else entry['tests'][name][0] for name in same}


def reads_of(notes):
    "The notes of `reads.py`: {path: 'i' or 'r'}"
    reads = {}
    for line in sorted(notes.splitlines()):     # r after i
        kind, _, what = line.partition(' ')
        if kind != 'x': reads[what] = kind
        elif what in PROGRAMS: reads |= dict.fromkeys((n for n in names() if n.startswith(PROGRAMS[what])), 'r')
        else: reads |= dict.fromkeys(names(), 'r')
    return reads


def entry_of(old, reads, results, started):
    """What to keep of a file of tests: old is what was kept, results {id: (outcome, stems)} of those that ran now.
    Nothing of a file that was edited after the start, since nobody knows which text was read"""
    left = unchanged(old) if old else {}
    if set(left) - set(results): reads = {**reads, **old['reads'], **{p: k for p, k in reads.items() if k == 'r'}}
    if any((ROOT/p).exists() and (ROOT/p).stat().st_mtime > started for p in reads): return None
    stems = {name: old['tests'][name][1] for name in left} | {name: s for name, (_, s) in results.items()}
    outcomes = {name: old['tests'][name][0] for name in left} | {name: outcome for name, (outcome, _) in results.items()}
    stamps = cache(lambda stems: stamp(reads, stems))
    tests = {name: (outcome, stems[name], stamps(tuple(stems[name])))
             for name, outcome in outcomes.items() if outcome != 'failed'}
    return dict(reads=reads, tests=tests, stamp='' if 'failed' in outcomes.values() else stamp(reads))
