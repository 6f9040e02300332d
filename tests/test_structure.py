"The project's own promises: modules, layers, imports, chapters, generated files"
import ast, configparser, importlib, inspect, json, os, re, subprocess, sys
from pathlib import Path

import pytest
from conftest import NBS, ROOT, each


CELLS = {p: json.loads(p.read_text(encoding='utf-8'))['cells'] for p in NBS}
TEXTS = {p: [''.join(c['source']) for c in cells] for p, cells in CELLS.items()}
# module → the number of the notebook that exports it
NUMBER = {m[1]: int(p.name[:2]) for p in NBS for t in TEXTS[p] if (m := re.match(r'#\| *default_exp +(\w+)', t))}
NOTEBOOK = {m[1]: p for p in NBS for t in TEXTS[p] if (m := re.match(r'#\| *default_exp +(\w+)', t))}
CHAPTERS = [p for p in NBS if re.match(r'(0[1-9]|[123]\d|40|86)_', p.name)]
TOOLS = {'doctor', 'cli', 'all'}
LABORATORY = {'toys', 'zoo', 'plots', 'tensorcore', 'shadows', 'findings', 'lockstep'}      # any module may import them
LIBRARY = [m for m in NUMBER if m not in TOOLS]
LIGHT = [m for m in NUMBER if m not in ('callback', 'learner', 'all')]       # import without fastai
HEADINGS = ['What goes wrong', 'What we built', 'In earnest', 'Questions', 'Exercises', 'Further reading']
sources, notebooks, chapters = each('module', NUMBER), each('path', NBS), each('path', CHAPTERS)


def tree(module): return ast.parse((ROOT/f'mpcourse/{module}.py').read_text(encoding='utf-8'))


def public_names(module):
    "What a module exports, and the checkers of its exercises, which a star leaves out"
    defined = {n.name for n in tree(module).body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name[0] != '_'}
    defined -= {n.name for n in tree(module).body if isinstance(n, ast.FunctionDef) and n.decorator_list}    # a patch is no name
    return sorted(defined | set(importlib.import_module(f'mpcourse.{module}').__all__))


def internal_imports(node):
    "The modules of the package that a piece of code imports"
    for n in ast.walk(node):
        if isinstance(n, ast.ImportFrom) and (n.level or (n.module or '').split('.')[0] == 'mpcourse'):
            mod = (n.module or '').removeprefix('mpcourse').strip('.')
            yield from [mod.split('.')[0]] if mod else [a.name for a in n.names]
        elif isinstance(n, ast.Import):
            yield from [a.name.split('.')[1] for a in n.names if a.name.startswith('mpcourse.')]


def functions(module):
    "Every function of a module with the lines of its body; of a docstring, in which its parameters are, the first"
    for n in ast.walk(tree(module)):
        if not isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)): continue
        first = n.body[0].end_lineno if ast.get_docstring(n) else n.body[0].lineno
        yield n, n.end_lineno - first + 1


# --- modules ---

def test_no_orphan_module():
    files = {p.stem for p in (ROOT/'mpcourse').glob('*.py')} - {'__init__', '_modidx', '_docs'}
    assert files == set(NUMBER), 'a module without a notebook, or a notebook without its module'
    assert len(set(NUMBER.values())) == len(NUMBER), 'two notebooks share a number'


def test_no_name_is_exported_twice_or_none():
    seen = {}
    for m in NUMBER:
        if m == 'all': continue
        mod = importlib.import_module(f'mpcourse.{m}')
        for name in public_names(m):
            assert name not in seen, f'{name} is exported by {seen.get(name)} and by {m}'
            assert getattr(mod, name) is not None, f'{m}.{name} is None'
            seen[name] = m


@sources
def test_no_method_is_given_twice(module):
    "`@patch` puts a function into a class; two of a name in one class, and the first is lost without a word"
    seen = []
    for n in tree(module).body:
        if isinstance(n, ast.ClassDef): seen += [(n.name, f.name) for f in n.body if isinstance(f, ast.FunctionDef) and 'setter' not in ast.dump(f)]
        elif isinstance(n, ast.FunctionDef) and any('patch' in ast.dump(d) for d in n.decorator_list):
            seen.append((ast.unparse(n.args.args[0].annotation), n.name))
    assert len(seen) == len(set(seen)), [s for s in seen if seen.count(s) > 1]


def test_all_brings_every_name_of_the_library():
    import mpcourse.all as everything
    want = [n for m in LIBRARY for n in importlib.import_module(f'mpcourse.{m}').__all__]
    assert sorted(everything.__all__) == sorted(want), 'nbs/93_all.ipynb does not name every chapter'
    names = {}
    exec('from mpcourse.all import *', names)
    assert not set(want) - set(names)
    assert len(want) <= 300, 'a name that only its module needs is exported by `#| exporti`'


@sources
def test_imports_only_point_down(module):
    for name in internal_imports(tree(module)):
        assert name in NUMBER, f'{module} imports {name}, which no notebook exports'
        if name not in LABORATORY: assert NUMBER[name] < NUMBER[module], f'{module} ({NUMBER[module]}) imports {name} ({NUMBER[name]})'


@sources
def test_imports_are_of_public_names(module):
    private = [f'{n.module}.{a.name}' for n in ast.walk(tree(module)) if isinstance(n, ast.ImportFrom) and (n.level or 'mpcourse' in (n.module or ''))
               for a in n.names if a.name.startswith('_')]
    assert not private, f'{module} takes what is another module\'s own: {private}'


@sources
def test_no_star_and_no_vision(module):
    text = (ROOT/f'mpcourse/{module}.py').read_text()
    assert module == 'all' or not re.search(r'^\s*from \S+ import \*', text, re.M)
    assert not re.search(r'^\s*(from|import) (torchvision|fastai\.vision)', text, re.M)


BLOCKER = '''
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {blocked!r}: raise ImportError(name + ' is blocked')
sys.meta_path.insert(0, Block())
'''


def run_blocked(blocked, code):
    r = subprocess.run([sys.executable, '-c', BLOCKER.format(blocked=blocked) + code], capture_output=True, text=True, timeout=120)
    assert r.returncode == 0, r.stdout + r.stderr


EACH = """
import importlib, os, torch
def fails(module):
    "In a process of its own, which begins with torch alone"
    if child := os.fork(): return os.waitpid(child, 0)[1]
    try: importlib.import_module('mpcourse.' + module)
    except BaseException as e:
        print(module, repr(e), flush=True)
        os._exit(1)
    os._exit(0)
assert not any([fails(module) for module in {modules}])
"""


@pytest.mark.library
def test_imports_without_fastai(): run_blocked({'fastai', 'torchvision', 'spacy'}, EACH.replace('{modules}', repr(LIGHT)))


@pytest.mark.sweep(0)
@pytest.mark.library
def test_everything_imports_without_torchvision():
    run_blocked({'torchvision'}, 'from mpcourse.all import *\nassert fp16.max == 65504 and callable(quantize)')


def test_the_blocker_blocks():
    with pytest.raises(AssertionError, match='fastai is blocked'): run_blocked({'fastai'}, 'import fastai')


# --- code ---

@sources
def test_functions_are_short(module):
    long = {f'{module}.{n.name}': lines for n, lines in functions(module) if lines > 25}
    assert not long, f'longer than 25 lines: {long}'


def test_no_module_becomes_denser():
    "Comprehensions, conditional expressions, parallel assignments, lines over 100 columns: tests/density.json may only fall"
    from density import STORE, modules
    stored, found = json.loads(STORE.read_text()), modules()
    assert found.keys() == stored.keys(), 'python tests/density.py'
    denser = [f'{name}: {n} {what}, {stored[name][what]} allowed' for name, numbers in found.items()
              for what, n in numbers.items() if n > stored[name][what]]
    assert not denser, denser


@sources
def test_lines_are_short(module):
    lines = (ROOT/f'mpcourse/{module}.py').read_text().splitlines()
    long = [i for i, line in enumerate(lines, 1) if len(line) > 120 and not line.startswith(('"""', '__all__'))]
    assert not long, f'lines of more than 120 columns: {long}'


@sources
def test_public_names_have_docstrings(module):
    mod = importlib.import_module(f'mpcourse.{module}')
    for name in public_names(module) if module != 'all' else []:
        obj = getattr(mod, name)
        if not (inspect.isclass(obj) or inspect.isfunction(obj)) or getattr(obj, '__module__', '') != mod.__name__: continue
        assert inspect.getdoc(obj), f'{module}.{name} has no docstring'
        for k, m in vars(obj).items() if inspect.isclass(obj) else []:
            if k.startswith('_') or not inspect.isfunction(m): continue
            assert inspect.getdoc(getattr(obj, k)), f'{module}.{name}.{k} has no docstring'


@sources
def test_parameters_of_public_functions_are_documented(module):
    text = (ROOT/f'mpcourse/{module}.py').read_text().splitlines()
    exported = public_names(module)
    for n in tree(module).body:
        if not isinstance(n, ast.FunctionDef) or n.name not in exported: continue
        for a in [*n.args.posonlyargs, *n.args.args, *n.args.kwonlyargs]:
            assert '#' in text[a.end_lineno - 1] or '#' in text[a.end_lineno], f'{module}.{n.name}: what is {a.arg}?'


def test_no_module_state():
    for module in LIBRARY:
        for n in tree(module).body:
            assert not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)), f'{module} does something when it is imported: {ast.unparse(n)}'
        for n in ast.walk(tree(module)): assert not isinstance(n, ast.Global), f'{module} changes a global name'


# --- chapters ---

@notebooks
def test_first_cell(path):
    assert CELLS[path][0]['cell_type'] == 'markdown'
    lines = [x for x in TEXTS[path][0].splitlines() if x.strip()]
    assert re.match(r'# \S', lines[0]) and lines[1].startswith('> ')
    promise = lines[1].removeprefix('> ')
    sentence = re.split(r'(?<=[.?!]) ', promise)[0]         # which README takes
    assert len(promise.split()) <= 25 and (len(sentence.split()) <= 12 or path.stem == 'index'), promise
    extra = [x for x in lines[2:] if not re.match(r'(> |- [\w-]+: )', x)]
    assert not extra, f'nbdev drops this text: {extra}'
    assert sum(bool(re.match(r'# ', x)) for t, c in zip(TEXTS[path], CELLS[path]) if c['cell_type'] == 'markdown' for x in t.splitlines()[:1]) == 1


@chapters
def test_headings_in_order(path):
    md = [t for t, c in zip(TEXTS[path], CELLS[path]) if c['cell_type'] == 'markdown']
    shown = [re.sub(r':::+ *\{[^}]*\}\s*\n+#+ .+', '', t) for t in md]  # a callout's first heading is its title
    heads = [m[1].strip() for t in shown for m in re.finditer(r'^## (.+)$', t, re.M)]
    found = [h for h in heads if h in HEADINGS]
    assert found == [h for h in HEADINGS if h in found or h not in ('In earnest', 'Questions')], f'found {found}'
    steps = heads[heads.index('What goes wrong') + 1:heads.index('What we built')]
    assert 2 <= len(steps) <= 9, f'steps: {steps}'
    for t, c in zip(TEXTS[path], CELLS[path]):
        if c['cell_type'] != 'markdown' or '## In earnest' not in t: continue
        assert t.startswith('## In earnest') and '\n## ' not in t, 'pages fold the cells from here to the next cell that begins with ##'
        assert c['metadata'] == {'jp-MarkdownHeadingCollapsed': True}, 'JupyterLab folds it, too'
    if 'In earnest' in heads: assert any(t.startswith(f'## {heads[heads.index("In earnest") + 1]}') for t in md)


@chapters
def test_chapter_opens_with_what_it_needs(path):
    opening = ' '.join(t for t, c in zip(TEXTS[path][1:6], CELLS[path][1:6]) if c['cell_type'] == 'markdown')
    at = [opening.find(f'**{w}**') for w in ('You need', 'You will build', 'You will see')]
    assert -1 not in at and at == sorted(at)
    if path.stem < '88': assert re.search(r'\d+ minutes to read', opening), 'README tells the minutes'


@notebooks
def test_minutes_are_counted(path):
    "200 words or eight lines of code a minute and 45 seconds a figure, without what is folded"
    stated = re.search(r'^(\d+) minutes to read', '\n'.join(TEXTS[path]), re.M)
    if not stated: return
    words = lines = figures = 0
    for text, cell in zip(TEXTS[path], CELLS[path]):
        if re.match(r'## (In earnest|Exercises)', text): break
        if cell['cell_type'] == 'markdown':
            words += len(re.findall(r'\w+', text))
            continue
        figures += 'fig-cap' in text or 'Live(' in text
        if not re.search(r'^#\| *(hide|code-fold)', text, re.M):
            lines += len(re.findall(r'^(?!#\||from |import )\s*\S', text, re.M))
    counted = words/200 + lines/8 + .75*figures
    assert abs(int(stated[1]) - counted) <= 2, f'{counted:.0f} minutes'


@chapters
def test_exercises_are_graded_and_solved(path):
    text = '\n'.join(TEXTS[path])
    after = text[text.index('## Exercises'):text.index('## Further reading')]
    marks = re.findall(r'●○○|●●○|●●●', after)
    assert (2 if path.stem > '37' else 3) <= len(marks) <= 5 and marks == sorted(marks), marks
    solutions = re.findall(r':::+ *\{\.callout[^}]*collapse="true"', after)
    assert len(solutions) == len(marks) and len(re.findall(r'^:::\s*$', after, re.M)) == len(solutions)


@notebooks
def test_figures_have_caption_and_alt(path):
    for t in TEXTS[path]:
        head = t.split('\n\n')[0]
        assert ('#| fig-cap:' in head) == ('#| fig-alt:' in head), t[:100]


@notebooks
def test_directives_stand_at_the_top(path):
    for t, c in zip(TEXTS[path], CELLS[path]):
        if c['cell_type'] != 'code': continue
        lines = t.splitlines()
        n = next((i for i, x in enumerate(lines) if x.strip() and not x.startswith('#|')), len(lines))
        late = [x for x in lines[n:] if re.match(r'#\| *(export|hide|fig-|eval|cuda)', x)]
        assert not late or any(q in t for q in ("'''", '"""')), f'directives below code: {late}'


@notebooks
def test_imports_stand_alone(path):
    "nbdev runs every cell that holds an import when it makes the site, and only those: no other code may stand there"
    for t, c in zip(TEXTS[path], CELLS[path]):
        if c['cell_type'] != 'code' or re.search(r'^#\| *eval: *false|^[%!]', t, re.M): continue
        body = [n for n in ast.parse(t).body if not re.match(r'use_style\(\)|torch\.set_num_threads', ast.unparse(n))]
        kinds = {isinstance(n, (ast.Import, ast.ImportFrom)) for n in body}
        assert len(kinds) < 2, f'imports and other code in one cell: {t[:120]}'


@notebooks
def test_outputs_are_few_small_and_clean(path):
    for c in CELLS[path]:
        outs = c.get('outputs', [])
        if path.stem != 'index': assert not outs, 'notebooks are committed without outputs'
        text = json.dumps(outs)
        assert len(text) < 300_000 and '"stderr"' not in text and str(Path.home()) + '/' not in text and '/site-packages/' not in text
        assert c.get('metadata', {}) in ({}, {'jupyter': {'source_hidden': True}}, {'jp-MarkdownHeadingCollapsed': True}, {'tags': ['slide']})


@notebooks
def test_links_between_notebooks_resolve(path):
    for t, c in zip(TEXTS[path], CELLS[path]):
        if c['cell_type'] != 'markdown': continue
        for target in re.findall(r'\]\(([\w./-]+)(?:#[^)]*)?\)', t):
            if '://' not in target: assert (path.parent/target).exists(), f'{target} does not exist'


def test_a_timing_is_never_asserted():
    for p in NBS:
        for t in TEXTS[p]:
            assert '%timeit' not in t and '%time' not in t, p.name
            bad = [x for x in t.splitlines() if x.startswith('assert') and re.search(r'perf_counter|\bseconds\b|elapsed', x)]
            assert not bad, f'{p.name}: {bad}'

# a generator of random numbers gets its seed from toys.seed, so that MPCOURSE_SEED reaches every cell
SEEDED = r'\b(manual_seed|(?:random|rng)\.seed|default_rng|RandomState|random\.Random)\((?!(?:run_)?seed\()'


def test_seeds_in_cells_come_from_one_function():
    """Exempt: exported code, which takes a seed or a generator as an argument (`make claims` shifts what the cells hand it),
    and exercises' solutions and checkers, which compare with fixed answers"""
    bad = {f'{p.name} {c["id"]}': found for p in NBS for t, c in zip(TEXTS[p], CELLS[p]) if c['cell_type'] == 'code'
           and not re.search(r'^#\| *export|^(def )?check_\w+\(', t, re.M) and (found := re.findall(SEEDED, t))}
    assert not bad, f'these cells seed without toys.seed: {bad}'


def test_the_rule_about_seeds_sees_a_fixed_one():
    for code in ('torch.manual_seed(0)', 'g = torch.Generator().manual_seed(n)', 'np.random.default_rng()', 'random.Random(1)', 'rng.seed(0)'):
        assert re.search(SEEDED, code), code
    for code in ('torch.manual_seed(seed(0))', 'torch.Generator().manual_seed(run_seed(3))', 'toy.model(seed=0)'): assert not re.search(SEEDED, code), code



# --- generated files and settings ---

def settings():
    cfg = configparser.ConfigParser(delimiters=['='])
    cfg.read(ROOT/'settings.ini', encoding='utf-8')
    return cfg['DEFAULT']


def test_readme_is_current():
    pytest.importorskip('nbconvert')
    from tools.readme import readme_current
    assert readme_current(), 'README.md is not what nbs/index.ipynb says: make readme'


FIGURE = re.compile(r'-?\d+\.\d+|-?\.\d+|\d+')


def test_readme_shows_what_the_index_prints_today():
    "Words to the letter; measured numbers nearly, since another processor's last digits differ; pictures by what they show"
    pytest.importorskip('nbclient')
    import io, nbformat
    from matplotlib.image import imread
    from tools import readme as R
    ran = ROOT/'_course/index.ipynb'                  # of the stage before this one
    new = nbformat.read(ran, as_version=4) if os.environ.get('MPCOURSE_TEST') and ran.exists() else R.executed(ROOT/'nbs/index.ipynb')
    for c in new.cells:
        if c.cell_type == 'code': R.keep_shown(c)
    (text, *pictures), (now, *drawn) = (R.readme(ROOT/'nbs', index).values() for index in (None, new))
    text, now = text.decode(), now.decode()
    assert FIGURE.sub('N', text) == FIGURE.sub('N', now), 'make readme'
    for a, b in zip(FIGURE.findall(text), FIGURE.findall(now)): assert abs(float(a) - float(b)) <= max(.1, .4*abs(float(a))), (a, b)
    for a, b in zip(pictures, drawn, strict=True):
        a, b = (imread(io.BytesIO(p))[..., :3] for p in (a, b))
        h, w = (min(n) for n in zip(a.shape[:2], b.shape[:2]))
        assert abs(a[:h, :w] - b[:h, :w]).mean() < .1


def test_the_table_of_chapters_has_a_cell_of_its_own():
    cells = json.loads((ROOT/'nbs/index.ipynb').read_text(encoding='utf-8'))['cells']
    own, = [''.join(c['source']) for c in cells if '## The chapters' in ''.join(c['source'])]
    assert own.startswith('## The chapters') and own.count('\n## ') == 0, 'the first page puts a list of runs in its place'


def test_readme_names_every_chapter_and_command():
    text = (ROOT/'README.md').read_text(encoding='utf-8')
    assert len(text.encode()) <= 12*1024
    for p in CHAPTERS: assert f'nbs/{p.name}' in text, f'{p.name} is missing in the chapter table'
    for command in ('make course', 'make test'): assert command in text
    for target in re.findall(r'\]\((?!https?:|#)([^)#]+)[^)]*\)', text): assert (ROOT/target).exists(), f'{target} does not exist'


def test_settings():
    cfg = settings()
    assert cfg['tst_flags'] == 'cuda' and 'torch>=2.6' in cfg['requirements'].split()
    pinned = [re.split('[<>=]', r)[0] for r in cfg['requirements'].split() if re.search('<', r)]
    assert not pinned, f'runtime requirements stay wide: {pinned}'
    assert 'torch<2.14' in cfg['dev_requirements'].split(), 'without a bound a resolver fetches a CUDA build of several GB'
    version = re.search(r'__version__ = "(.+)"', (ROOT/'mpcourse/__init__.py').read_text())[1]
    assert version == cfg['version']


def imported(node):
    "The packages that the statements of a module import"
    for n in node.body:
        names = [a.name for a in n.names] if isinstance(n, ast.Import) else [n.module] if isinstance(n, ast.ImportFrom) and not n.level else []
        yield from {x.split('.')[0] for x in names} - set(sys.stdlib_module_names) - {'mpcourse', 'tools', 'run'}    # tests/run.py


def test_imports_are_declared():
    "What a module imports at its top is a requirement; what a tool imports is one, or in `dev`"
    alias = {'sklearn': 'scikit-learn', 'yaml': 'pyyaml', 'jupyter_client': 'nbclient', 'pygments': 'nbconvert', 'traitlets': 'nbconvert'}
    have, course, dev = ({re.split('[<>=]', r)[0] for r in settings()[k].split()} for k in ('requirements', 'course_requirements', 'dev_requirements'))
    assert have == {'torch', 'fastcore', 'numpy'}, 'nothing that replaces the torch of a user, as the torchvision of fastai may'
    assert course <= dev
    for m in NUMBER:
        needs = have | dict(callback={'fastai'}, learner={'fastai'}, all={'fastai'}, cases={'pandas'}).get(m, set())
        for name in imported(tree(m)): assert alias.get(name, name) in needs, f'{m} imports {name}, which settings.ini does not require'
    for f in (ROOT/'tools').glob('*.py'):
        for name in imported(ast.parse(f.read_text(encoding='utf-8'))): assert alias.get(name, name) in have | dev, f'{f.name} imports {name}'


def test_tools_are_short_and_not_in_the_wheel():
    from setuptools import find_packages
    include = re.search(r'find_packages\(include=\[(.*?)\]\)', (ROOT/'setup.py').read_text())[1]
    assert find_packages(str(ROOT), include=eval(include, {'cfg': settings()})) == ['mpcourse']
    for f in (ROOT/'tools').glob('*.py'):
        for n in ast.walk(ast.parse(f.read_text(encoding='utf-8'))):
            if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)): assert n.end_lineno - n.body[0].lineno < 25, f'{f.name}: {n.name}'


def test_ci_runs_what_make_test_runs():
    run = (ROOT/'.ci/run').read_text()
    assert 'set -euo pipefail' in run and run.rstrip().endswith('make test') and 'chromium' in run
    assert (ROOT/'.ci/run').stat().st_mode & 0o111, '.ci/run cannot be executed'
    assert '.ci/run' in (ROOT/'.github/workflows/test.yml').read_text()
    assert 'run: make claims' in (ROOT/'.github/workflows/claims.yml').read_text()


def test_workflows_name_actions_by_commit_and_mix_no_second_index():
    for path in (ROOT/'.github/workflows').glob('*.yml'):
        text = path.read_text()
        assert all(re.fullmatch(r'[0-9a-f]{40}', ref) for ref in re.findall(r'uses: \S+@(\S+)', text)), path
        assert 'EXTRA_INDEX' not in text, path


def test_what_a_mutant_changes_stands_in_the_code():
    from tools.mutants import M, check_texts
    assert check_texts(M) == []


# --- slides ---

@pytest.mark.parametrize('path', [p for p in CHAPTERS if p.stem[:2] in '01 02 04 05 07 08 09 10'.split()], ids=lambda p: p.stem)
def test_code_on_slides_is_the_code_of_the_chapter(path):
    from tools.slides import narrow, tagged
    codes = [''.join(c['source']) for c in CELLS[path] if c['id'] in tagged(path)]
    assert 3 <= len(codes) <= 8
    for code in codes: assert ast.dump(ast.parse(narrow(code))) == ast.dump(ast.parse(code))
