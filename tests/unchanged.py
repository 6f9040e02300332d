"""Leaves out tests that passed before with the same code: `make test` uses it, CI does not.

A test is its own text, what it names in its file, the modules of mpcourse behind these, and every file
that is no chapter, module or test. If it mentions notebooks or pages, it also is all of them, or those
that it is given. `.green.json` keeps a fingerprint of each test that passed."""
import ast, importlib.metadata, json, os, re, sys
from collections import defaultdict
from functools import cache
from pathlib import Path

from tools.notebooks import ROOT, bare, code_cells, code_hash, digest, imported, module_files, read_text

GREEN = ROOT/'.green.json'
PACKAGE = ROOT/'mpcourse'
NBS = sorted((ROOT/'nbs').glob('*.ipynb'))
READS_CHAPTERS = re.compile(r"\bNBS\b|\bnbs/[\d{]|(ROOT|parent)/f?'(nbs|_course)|course_pages|tools\.exercises")
# another Python, a module by its name, all at once: any module may be called
CALLS_ALL = re.compile(r'sys\.executable|\branks\b|import_module|import mpcourse\b(?!\.)|mpcourse\.all')


# --- what a test is made of ---

def given(node):
    "The names to which a statement gives something; '' if there are none"
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)): return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).split('.')[0] for alias in node.names}
    names = (n for n in ast.walk(node) if isinstance(n, ast.Name))
    return {n.id for n in names if isinstance(n.ctx, ast.Store)} or {''}


@cache
def used(node):
    "The names that a statement uses: in expressions, as parameters (fixtures), as text (usefixtures)"
    names = set()
    for n in ast.walk(node):
        if isinstance(n, ast.Name): names.add(n.id)
        elif isinstance(n, ast.arg): names.add(n.arg)
        elif isinstance(n, ast.Constant) and isinstance(n.value, str): names.add(n.value)
    return names


@cache
def text_of(node):
    "A statement as Python, without its comments"
    return ast.unparse(node)


@cache
def definitions(path):
    "The statements at the top of a file by the names that they give"
    found = defaultdict(list)
    for node in ast.parse(read_text(path)).body:
        for name in given(node): found[name].append(node)
    return dict(found)


@cache
def needs(
    path: Path, # of a file of tests
    name: str,  # of a test, or of its class
) -> list: # of statements, as Python
    "A test with all that it names in its file, and what these name: helpers, constants, imports"
    known = definitions(path)
    nodes, seen, todo = set(), set(), [name, '']
    while todo:
        word = todo.pop()
        if word in seen: continue
        seen.add(word)
        for node in known.get(word, []):
            nodes.add(node)
            todo += used(node)
    return sorted(map(text_of, nodes))


@cache
def helpers():
    "Python files that tests import, by name"
    folders = 'tests', 'tests/promises', 'tools', 'studies', 'bench'
    return {p.stem: p for f in folders for p in (ROOT/f).glob('*.py') if not p.name.startswith('test_')}


@cache
def modules(code):
    "The files of mpcourse that a statement or a helper imports, also by way of a helper"
    files, seen, todo = set(), set(), [code]
    while todo:
        tree = ast.parse(todo.pop())
        lines = '\n'.join(ast.unparse(n) for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom)))
        for name in imported(lines): files |= module_files(name, PACKAGE)
        words = set(re.findall(r'\w+', lines)) - seen
        seen |= words
        todo += [read_text(path) for stem, path in helpers().items() if stem in words]
    return files


# --- fingerprints ---

@cache
def fingerprint(path):
    "Of a file; comments and docstrings of a module do not count"
    if not path.exists(): return ''
    if path.suffix == '.py' and path.parent == PACKAGE: return digest(bare(read_text(path)))
    return digest(path.read_bytes().hex())


@cache
def house():
    "Of Python, torch, and every file of the project that is no chapter, module, test or text"
    files = [p for p in ROOT.iterdir() if not p.name.startswith('.')]
    for folder in ('.ci', '.github', 'bench', 'mpcourse', 'nbs', 'studies', 'tests', 'tools'):
        files += (ROOT/folder).rglob('*')
    known = re.compile(r'nbs/[^/]*\.ipynb$|mpcourse/\w+\.py$|/test_\w+\.py$|\.md$|__pycache__|_checkpoints')
    other = [p for p in sorted(files) if p.is_file() and not known.search(p.as_posix())]
    versions = [importlib.metadata.version(n) for n in ('torch', 'fastai', 'fastcore')]
    return digest(sys.version, *versions, *(p.relative_to(ROOT).as_posix() for p in other), *map(fingerprint, other))


@cache
def headings():
    "Of all chapters' headings, to which pages link"
    return digest(*(line for p in NBS for line in re.findall(r'"#+ [^"]*"', read_text(p))))


@cache
def texts():
    "Of what stands beside the chapters: README, CONTRIBUTING, CHANGELOG"
    return digest(*map(fingerprint, sorted(ROOT.glob('*.md'))))


@cache
def chapter(stem):
    "Of a chapter, the code that it calls, and its page"
    path = ROOT/f'nbs/{stem}.ipynb'
    sources = [source for _, _, source in code_cells(path)]
    return digest(headings(), fingerprint(path), code_hash(sources), fingerprint(ROOT/f'_course/{stem}.html'))


def chapters_of(item, code):
    "Which chapters a test reads: those that it is given, or that its file names, or all"
    params = item.callspec.params.values() if hasattr(item, 'callspec') else []
    given = {str(getattr(v, 'stem', v)) for v in params}
    for mark in item.iter_markers('chapters'): given |= set(mark.args)
    known = {p.stem for p in NBS}
    if given & known: return given & known
    return known if READS_CHAPTERS.search(code) else ()


def stamp(item):
    "The fingerprint of a test"
    name = re.split(r'::|\[', item.nodeid)[1]
    statements = needs(item.path, name)
    code = '\n'.join(statements)
    files = {PACKAGE/'__init__.py'}
    if CALLS_ALL.search(code): files.update(PACKAGE.glob('*.py'))
    for statement in statements:
        if 'import ' in statement: files |= modules(statement)
    parts = [house(), code, *map(fingerprint, sorted(files))]
    parts += map(chapter, sorted(chapters_of(item, code)))
    if re.search(r'\.md\b', code): parts.append(texts())
    return digest(*parts)


# --- hooks of pytest ---

def kept():
    "The fingerprints of tests that passed, by environment and test"
    return json.loads(GREEN.read_text()) if GREEN.exists() else {}


def pytest_collection_modifyitems(config, items):
    "Leave out those that passed with the fingerprint that they have now"
    green = kept().get(sys.prefix, {})
    changed, same = [], []
    for item in items:
        item.user_properties.append(('stamp', stamp(item)))
        old = green.get(item.nodeid) == item.user_properties[-1][1]
        (same if old else changed).append(item)
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
