"""The exercises: `python -m tools.exercises check 09 mine.py` for a learner, `list | strip OUT | mark FILE | self` for a teacher.

`mark FOLDER --csv marks.csv` marks all notebooks and Python files of a folder, several at a time, and sums up what the class knows.
`--only 01.2 02.2` marks what was asked, `--notebook my_85.ipynb` marks by your own copy of a chapter.

A student's code runs in a separate process with a time limit. It can do whatever you can do, so mark in a container.
"""
import argparse, ast, contextlib, csv, importlib, json, os, re, secrets, select, signal, subprocess, sys, tokenize
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import SimpleNamespace

try: import resource
except ImportError: resource = None  # Windows, where nothing is marked

ROOT = Path(__file__).resolve().parent.parent
NOT_UTF8 = 'The file is not UTF-8: save it again, in this encoding.'
COPIED = "Only the course's own solution stands there."
MOODLE = r'(?:.*_assignsubmission_file_)?'  # what it puts before the name that the student gave
HEAD = re.compile(r'^\*\*(\d+) ([●○]{3}) ([^*]+?)\*\* *(.*)', re.M | re.S)


@dataclass(frozen=True)
class Exercise:
    "One exercise of a chapter"
    notebook: Path # of the chapter
    number: int    # within it
    level: int     # 1 to 3: as many points
    title: str     # without a full stop
    task: str      # Markdown
    name: str      # of what is to be written
    check: str     # of its checker, without check_
    solution: str  # the course's own, as Python

    @property
    def id(self): return f'{re.search("[0-9][0-9]", self.notebook.name)[0]}.{self.number}' # '08.2', also in my_08.ipynb


def notebooks(): return sorted(p for p in (ROOT/'nbs').glob('[0-9]*.ipynb') if p.name < '88')


def read(path):
    "The cells of a notebook, without nbformat, which takes a second or two to import"
    try: cells = json.loads(path.read_text(encoding='utf-8'))['cells']
    except (KeyError, TypeError, json.JSONDecodeError): raise ValueError(f'{path.name} is empty or no notebook of format 4: save it again in Jupyter.') from None
    for c in cells: c['source'] = ''.join(c['source'])
    return [SimpleNamespace(**{'metadata': {}, **c}) for c in cells]


def opens_solution(c): return c.cell_type == 'markdown' and re.search(r'^:::+ *\{.*callout.*\n+#+ Solution', c.source, re.M)
def closes_solution(c): return c.cell_type == 'markdown' and re.match(r':::\s*$', c.source, re.M)


def exercises(
    notebook: Path, # of a chapter
) -> list: # of `Exercise`, in order
    "What a chapter asks for: a head, a stub that says `your turn`, a folded solution"
    found, head, stub, code = [], None, None, None
    for c in read(notebook):
        if code is not None and closes_solution(c):
            what = int(head[1]), head[2].count('●'), head[3].strip(' .'), head[4].strip()
            found.append(Exercise(notebook, *what, *stub, '\n'.join(code)))
            code = stub = None
        if c.cell_type == 'markdown': head = HEAD.search(c.source) or head
        elif code is not None: code.append(c.source)
        elif m := re.search(r'your turn.*^# ?check_(\w+)\((\w+)\)', c.source, re.M | re.S): stub = m[2], m[1]
        if stub and opens_solution(c): code = []
    return found


def all_exercises(): return [e for p in notebooks() for e in exercises(p)]


def checkers(
    notebook: Path, # of a chapter
) -> dict: # name of a solution -> its checker
    "The checkers of a chapter's exercises, in the namespace of its module"
    cells = [c.source for c in read(notebook) if c.cell_type == 'code']
    names = module_names(cells)
    for code in cells:
        imports = re.match(r'(?!#\| *export)(#\|.*\n)?(from|import) ', code) and not re.search(r'^def ', code, re.M)
        if imports or re.search(r'^def check_', code, re.M): exec(code, names)
    return {n.removeprefix('check_'): f for n, f in names.items() if n.startswith('check_')}


def module_names(
    cells: list, # sources of a chapter's code
) -> dict: # what its module defines; empty without a module
    "The namespace in which a chapter's answers run"
    for code in cells:
        exported = re.match(r'#\| *default_exp +(\w+)', code)
        if exported: return dict(vars(importlib.import_module(f'mpcourse.{exported[1]}')))
    return {}


# --- a learner's file ---

def python_text(path):
    "A Python file in the encoding that it declares; by default UTF-8"
    with tokenize.open(path) as f: return f.read()


def check(
    chapter: str, # its number
    file: Path,   # Python with solutions
) -> int: # 0 if every solution is right, else 1
    "Run the solutions of a file against the checkers of a chapter"
    found = [n for n in notebooks() if n.name.startswith(f'{chapter:0>2}_')]
    if not found: raise SystemExit(f'There is no chapter {chapter} with exercises.')
    try: text = python_text(file)
    except OSError as e: raise SystemExit(f'{file} cannot be read ({e.strerror}): give another file.') from None
    except (UnicodeDecodeError, SyntaxError): raise SystemExit(f'{file}: {NOT_UTF8}') from None
    known, given = checkers(found[0]), module_names([c.source for c in read(found[0])])
    answers = {**given, '__name__': '__main__'}                 # with what the chapter imports, as in its notebook
    exec(compile(text, str(file), 'exec'), answers)
    solved = [name for name in known if callable(answers.get(name)) and answers[name] is not given.get(name)]
    if not solved: raise SystemExit(f'{file} has no function of these names: {", ".join(known)}.')
    wrong = 0
    for name in solved:
        verdict = 'right'
        try: known[name](answers[name])
        except AssertionError as e: verdict = f'no: {e}'
        except Exception as e: verdict = f'no: {type(e).__name__}: {e}'
        wrong += verdict != 'right'
        print(f'{name}: {verdict}')
    return int(wrong > 0)


# --- notebooks without solutions ---

def strip(
    notebook: Path, # of a chapter
    out: Path,      # a folder
):
    "Write the notebook without its folded solutions"
    import nbformat
    nb, kept, inside = nbformat.read(notebook, as_version=4), [], False
    for c in nb.cells:
        if inside and closes_solution(c):
            inside, c.source = False, re.sub(r'^:::\s*', '', c.source)
        if opens_solution(c):
            inside, c.source = True, c.source[:re.search(r'^:::', c.source, re.M).start()].rstrip()
            if c.source: kept.append(c)
        elif not inside and c.source: kept.append(c)
    nb.cells = kept
    nbformat.write(nb, out/notebook.name)


# --- marks ---

FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
BLOCKS = ast.For, ast.While, ast.If, ast.With, ast.Try, ast.AugAssign


def parsed(code):
    "The syntax tree of a cell; lines of IPython's own are left out of it"
    try: return ast.parse(code)
    except SyntaxError as e:
        plain = re.sub(r'^\s*[%!].*$', '', code, flags=re.M)
        try: return ast.parse(plain)
        except SyntaxError: raise e from None


def top(nodes):
    "Statements of a cell, also those within `if`, `try`, `with` and loops, not those of functions and classes"
    for node in nodes:
        yield node
        if not isinstance(node, FUNCTIONS):
            for part in ('body', 'orelse', 'finalbody'): yield from top(getattr(node, part, ()))
            for handler in getattr(node, 'handlers', ()): yield from top(handler.body)


def names_of(node):
    "The names that a statement defines or imports"
    if isinstance(node, FUNCTIONS): return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)): return {(a.asname or a.name).split('.')[0] for a in node.names}
    if not isinstance(node, (ast.Assign, ast.AnnAssign, ast.For, ast.With)): return set()
    return {t.id for t in ast.walk(node) if isinstance(t, ast.Name) and isinstance(t.ctx, ast.Store)}


def defined(code):
    "Names that a cell defines or imports outside of functions"
    return set().union(*map(names_of, top(parsed(code).body)))


def by_star(code):
    "Names that a cell's `from … import *` brings"
    names = set()
    for node in top(parsed(code).body):
        if isinstance(node, ast.ImportFrom) and node.names[0].name == '*':
            with contextlib.suppress(Exception):
                exec(f'from {node.module} import *', found := {})
                names |= set(found)
    return names


def definitions(code, loops=False):
    "A cell without what it tries out; with its loops and branches, which may fill a table, if asked"
    keep = (*FUNCTIONS, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, *(BLOCKS if loops else ()))
    def wanted(node): return isinstance(node, keep) or isinstance(node, BLOCKS) and any(isinstance(n, FUNCTIONS) for n in top([node]))
    return compile(ast.Module([n for n in parsed(code).body if wanted(n)], []), 'answer', 'exec')


def provide(name, cells, names):
    "Run the first cell that defines a name; whether there is one"
    for code in cells:
        with contextlib.suppress(SyntaxError):
            if 'your turn' in code or name not in defined(code) | by_star(code): continue
            run(code, cells, names)
            return True
    return False


def run(code, cells, names):
    "What a cell defines; a loop that fails is taken for one that tries things out"
    mine = code in cells[:cells.index('')]
    if mine:
        with contextlib.suppress(Exception): return complete(definitions(code, loops=True), cells, names)
    complete(definitions(code), cells, names)


def complete(code, cells, names, tries=12):
    "Execute code; what it misses comes from other cells"
    for _ in range(tries):
        try: return exec(code, names)
        except NameError as e:
            if not provide(e.name, cells, names): raise


def judge(
    notebook: Path, # of the chapter
    name: str,      # of what was to be written
    check: str,     # of its checker
    code: str,      # a cell that defines it
    others=(),      # the student's cells, of which it may use what they define
) -> dict: # state: 'right' or 'wrong', says: why
    "The checker of the course, not the student's copy of it, on one answer"
    cells = [c.source for c in read(notebook) if c.cell_type == 'code']
    names, check = {**module_names(cells), '__name__': '__main__'}, checkers(notebook)[check]
    cells = [*filter(str.strip, others), '', *cells]  # the student's, then the chapter's
    try:
        for _ in range(12):
            run(code, cells, names)
            try: check(names[name])
            except NameError as e:                      # in the body of the answer
                if not provide(e.name, cells, names): raise
            else: return dict(state='right', says='')
    except SyntaxError as e: return dict(state='wrong', says=f'SyntaxError: {e.msg}: {(e.text or "").strip()}'[:300])
    except AssertionError as e: return dict(state='wrong', says=str(e)[:300])
    except Exception as e: return dict(state='wrong', says=f'{type(e).__name__}: {e}.'[:300])
    return dict(state='wrong', says='It needs more names than its notebook and the chapter can supply.')


def answers(path):
    "The cells of a student's file"
    if path.suffix.lower() == '.py': return [python_text(path)]
    return [c.source for c in read(path) if c.cell_type == 'code']


def judge_into(pipe, word, job, seconds):
    "In the child: write the verdict on an answer into a pipe. What the answer prints goes nowhere"
    os.setpgid(0, 0)
    if resource: resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3): os.dup2(null, fd)
    try: os.write(pipe, (word + json.dumps(judge(**job))).encode())
    finally: os._exit(0)


def in_child(job, seconds):
    """`judge` in a child of this process. The limit is the child's own time on a processor, so a mark does not depend on what else
    runs; what sleeps has three times as long. The verdict follows a secret word, which keeps out accidents, not who reads this"""
    word = secrets.token_hex(16)
    ours, theirs = os.pipe()
    child = os.fork()
    if not child: judge_into(theirs, word, job, seconds)
    os.close(theirs)
    ended = select.select([ours], [], [], 3*seconds if resource else seconds)[0]
    verdict = os.read(ours, 2**16).decode(errors='replace') if ended else ''
    os.close(ours)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if ended and not verdict else 0
    with contextlib.suppress(OSError): os.killpg(child, signal.SIGKILL)         # it, and what it has started
    with contextlib.suppress(OSError): os.waitpid(child, 0)
    if not ended or code == -signal.SIGXCPU: return dict(state='wrong', says=f'It takes longer than {seconds} s, or waits.', late=True)
    if not verdict: return dict(state='wrong', says=f'The answer ended its process (exit code {code}) before the checker was done.')
    if not verdict.startswith(word): return dict(state='wrong', says='It wrote where only the checker writes.')
    return json.loads(verdict.removeprefix(word))


def judge_all(notebook, others, jobs, seconds):
    "Verdicts on a submission's answers: the chapter is imported once, each answer runs in a child of this process"
    checkers(notebook)
    return [in_child(dict(notebook=notebook, others=others, **job), seconds) for job in jobs]


def in_process(notebook, others, jobs, seconds):
    "`judge_all` in a process that dies with whatever the answers did to it"
    if not jobs: return []
    call = [sys.executable, '-m', 'tools.exercises', 'judge', str(notebook.resolve()), '--seconds', str(seconds)]
    one = dict(os.environ, OMP_NUM_THREADS='1', PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')]))
    r = subprocess.run(call, input=json.dumps([others, jobs]), capture_output=True, text=True, cwd=ROOT, env=one)
    if r.returncode == 0: return json.loads(r.stdout.splitlines()[-1])
    return [dict(state='wrong', says=f'The process that judges it ended with exit code {r.returncode}.')]*len(jobs)


def sources(notebooks):
    "The code of chapters as they are handed out, solutions included: a cell that equals one of these nobody has written"
    return {c.source.strip() for n in notebooks for c in read(n) if c.cell_type == 'code'}


def count(name, code):
    "How many definitions of a name a cell has"
    try: return sum(name in names_of(node) for node in top(parsed(code).body) if not isinstance(node, BLOCKS))
    except SyntaxError: return len(re.findall(rf'^\s*(?:def|class) {name}\b|^{name} *=', code, re.M))


def number_of(path):
    "The chapter's number, with which a file's name begins; '' if it does not"
    found = re.match(rf'{MOODLE}(\d\d)(?!\d)', path.name)
    return found[1] if found else ''


def asked(path, chapter, only, notebook):
    "The notebook that a file belongs to, and the exercises to be marked"
    number = f'{chapter or number_of(path):0>2}'
    found = [notebook] if notebook else [n for n in notebooks() if n.name.startswith(f'{number}_')]
    todo = [e for n in found for e in exercises(n)]
    if not todo: raise SystemExit(f'{path.name} names no chapter with exercises: give --chapter 08, or begin its name with the number, as in 08_mine.py.')
    return found[0], [e for e in todo if not only or e.id in only]


def mark(
    path: Path,           # a student's notebook or Python file
    seconds: int=60,      # of a processor's time for each answer
    chapter: str|None=None, # its number; by default the file's name begins with it: 08_scaler.ipynb, 08_mine.py
    only=(),              # exercises, such as '08.2'; by default all of the chapter
    notebook: Path|None=None, # a copy of a chapter with other numbers, by which to mark
) -> dict: # points, of how many, and a row for each exercise; for a file that cannot be read, why
    "Marks for one chapter"
    found, todo = asked(path, chapter, only, notebook)
    course = sources({found, *(n for n in notebooks() if todo and n.name.startswith(todo[0].id[:2]))})
    codes, why, rows, jobs = [], {}, [], []
    try: codes = answers(path)
    except (UnicodeDecodeError, SyntaxError): codes, why = [path.read_text(encoding='latin-1')], dict(says=NOT_UTF8)
    except (OSError, ValueError) as e: why = dict(says=f'{type(e).__name__}: {e}'[:200])
    written = [code for code in codes if code.strip() not in course]
    for e in todo:
        mine = [code for code in written if count(e.name, code)]
        rows.append(dict(id=e.id, points=e.level, name=e.name, state='not tried', says=''))
        if mine and why: rows[-1].update(state='wrong', **why)
        elif mine: jobs.append((rows[-1], dict(name=e.name, check=e.check, code=mine[-1])))
        elif any(count(e.name, code) for code in codes): rows[-1]['says'] = COPIED
        else: rows[-1]['says'] = missing(e.name, codes, path, chapter)
    verdicts = in_process(found, written, [job for _, job in jobs], seconds)
    for (row, job), verdict in zip(jobs, verdicts):
        row.update(verdict)
        n = sum(count(job['name'], code) for code in written)
        if n > 1: row['says'] = f'{row["says"]} The last of {n} definitions was marked.'.strip()
    return dict(points=sum(r['points'] for r in rows if r['state'] == 'right'), of=sum(r['points'] for r in rows), exercises=rows, **why)


def missing(name, codes, path, chapter):
    "Why an exercise counts as not tried, as far as the file shows it"
    if not any(map(str.strip, codes)): return 'The file has no code.'
    if chapter and number_of(path) not in ('', f'{chapter:0>2}'): return f'It is marked as chapter {chapter}, and its name begins with {number_of(path)}.'
    found = set()
    for code in codes:
        with contextlib.suppress(SyntaxError): found |= defined(code)
    near = [n for n in found if n.lower().replace('_', '') == name.lower().replace('_', '')] or get_close_matches(name, found, 1, .8)
    if near: return f'It defines {near[0]}, not {name}.'
    if any('your turn' in code and name in code for code in codes): return 'The stub is as it was.'
    return f'Nothing defines {name}.'


def is_late(marks): return any(r.get('late') for r in marks['exercises'])


def mark_one(name, path, seconds, last, **asked):
    "Marks of a submission; one whose chapter is not known gets none, and says why"
    try: marks = mark(path, seconds, **asked)
    except SystemExit as e: marks = dict(points=0, of=0, exercises=[], says=str(e))
    result = 'waits' if is_late(marks) and not last else f"{marks['points']} of {marks['of']}"
    print(f'{name}: {result}', file=sys.stderr)
    return marks


def submissions(folder):
    "Files of a folder and its folders, by their names, and names of others; not those that a computer puts there by itself"
    names = {str(p.relative_to(folder)): p for p in sorted(folder.rglob('*')) if p.is_file()}
    names = {n: p for n, p in names.items() if not re.search(r'(^|[/\\])(\.|__)', n)}
    return {n: p for n, p in names.items() if is_code(p)}, [n for n, p in names.items() if not is_code(p)]


def is_code(path): return path.suffix.lower() in ('.py', '.ipynb')


def mark_folder(
    folder: Path,           # of notebooks and Python files, with any names
    seconds: int=60,        # for each answer
    workers: int=os.cpu_count(), # submissions at a time
    patience: int=10,       # what takes longer than these seconds waits until all others have been marked
    **asked,                # chapter, only and notebook, as for `mark`
) -> dict: # file's name -> marks
    "Marks for a class"
    (files, others), marks = submissions(folder), {}
    if not files: raise SystemExit(f'{folder} holds no notebook and no Python file.')
    todo = list(files)
    with ThreadPoolExecutor(workers) as pool:
        for limit in sorted({min(patience, seconds), seconds}):
            one = partial(mark_one, seconds=limit, last=limit == seconds, **asked)
            marks.update(zip(todo, pool.map(one, todo, [files[n] for n in todo])))
            todo = [n for n in todo if is_late(marks[n])]
    for name in others: marks[name] = dict(points=0, of=0, exercises=[], says='No notebook and no Python file: it was not read.')
    if not any(m['exercises'] for m in marks.values()): raise SystemExit(marks[min(files)].get('says') or 'Nothing of what was asked is in these chapters.')
    return marks


def in_order(id): return [int(n) for n in id.split('.')] # 85.2 before 85.10


def student(name):
    "Who handed a file in, and Moodle's number for it: from Moodle's name, the folder, or the name behind the chapter's number"
    first, *rest = Path(name).parts
    if found := re.match(r'(.*)_(\d+)_assignsubmission_file', first): return found[1], found[2]
    return (first if rest else re.sub(r'(?i)^\d\d(\.\d+)?[_ -]|\.(py|ipynb|zip|txt|pdf)$', '', first)), ''


def better(a, b): return ['not tried', 'wrong', 'right'].index(a['state']) > ['not tried', 'wrong', 'right'].index(b['state'])


def by_student(
    marks: dict, # from `mark_folder`
) -> list: # (name, numbers, rows by exercise, remarks) of each student
    "All files of a student together. Moodle's numbers differ between tasks; two of a name with the same exercises are two students"
    found = []
    for file, m in marks.items():
        (name, number), rows = student(file), {r['id']: r for r in m['exercises']}
        def joins(s): return s[0] == name and (number in s[1] or not rows.keys() & s[2].keys())
        mine = next(filter(joins, found), None) or (name, [], {}, [])
        if mine not in found: found.append(mine)
        if number and number not in mine[1]: mine[1].append(number)
        for id, r in rows.items():
            if id not in mine[2] or better(r, mine[2][id]): mine[2][id] = r
        says = m.get('says', '')
        if says: mine[3].append(says if Path(file).name in says else f'{Path(file).name}: {says}')
    return found


def without_numbers(says): return re.sub(r'-?(0x[0-9a-f]+|[\d.]*\d(e[-+]?\d+)?)(\*\*?-?\d+)*', '#', says)


def points(rows): return sum(r['points'] for r in rows.values() if r['state'] == 'right')


def summary(
    marks: dict, # from `mark_folder`
) -> list: # lines: the points, then for each exercise how many have it, and what most of the others were told
    "What a class knows"
    rows = [rows for _, _, rows, _ in by_student(marks) if rows]
    got = sorted(map(points, rows))
    lines = [f'{len(got)} students, points {got[0]} to {got[-1]}, median {got[len(got)//2]}']
    for id in sorted({id for r in rows for id in r}, key=in_order):
        mine = [r[id] for r in rows if id in r]
        states = Counter(r['state'] for r in mine)
        told = [r['says'] for r in mine if r['state'] == 'wrong']
        said = Counter(map(without_numbers, told)).most_common(1)
        line = f"{id}  right {states['right']}, wrong {states['wrong']}, not tried {states['not tried']}"
        if said and said[0][1] > 1:
            first = next(t for t in told if without_numbers(t) == said[0][0])
            line += f'; most often ({said[0][1]}), such as: {first[:120]}'
        lines.append(line)
    lost = [name for name, m in marks.items() if not m['exercises']]
    for text, names in (('Not marked, since no chapter is known (give --chapter)', [n for n in lost if is_code(Path(n))]),
                        ('Not read, since no notebook and no Python file', [n for n in lost if not is_code(Path(n))])):
        if names: lines.append(f'{text}: {", ".join(names)}')
    return lines


def write_csv(
    marks: dict, # from `mark_folder`
    path: Path,  # of the table: a row for each student
):
    "Marks for a spreadsheet; the points are of all that the class was asked, also of files that a student did not hand in"
    worth = {r['id']: r['points'] for m in marks.values() for r in m['exercises']}
    ids = sorted(worth, key=in_order)
    with path.open('w', newline='', encoding='utf-8-sig') as f:   # Excel reads names with umlauts only so
        table = csv.writer(f)
        table.writerow(['student', 'number', 'points', 'of', *ids, 'remarks'])
        for name, numbers, rows, remarks in by_student(marks):
            states = [rows[i]['state'] if i in rows else '' for i in ids]
            remarks = [*remarks, *(f"{i}: {rows[i]['says']}" for i in ids if i in rows and rows[i]['says'])]
            table.writerow([name, ' '.join(numbers), points(rows) if rows else '', sum(worth.values()), *states, ' | '.join(remarks)])


def own(todo):
    "Lines about solutions of the course that fail, and stubs that pass"
    found = []
    for e in todo:
        for code, wanted in ((e.solution, 'right'), (f'def {e.name}(*args, **kwargs): pass', 'wrong')):
            with contextlib.redirect_stdout(sys.stderr): r = judge(e.notebook, e.name, e.check, code)
            if r['state'] != wanted: found.append(f'{e.id} {e.name}: {"the solution" if wanted == "right" else "a stub"} is {r["state"]}. {r["says"]}')
    return found


def print_marks(a):
    "The marks of a file as JSON, or what a folder's class knows; the exit code"
    if not hasattr(os, 'fork'): raise SystemExit('Marking forks processes, which Windows cannot: mark in a container with Linux.')
    if a.notebook and not re.search(r'\d\d', a.notebook.name): raise SystemExit(f'{a.notebook.name} has no number: name it my_85.ipynb, say.')
    known = {e.id for e in (exercises(a.notebook) if a.notebook else all_exercises())}
    if wrong := set(a.only or ()) - known: raise SystemExit(f'There is no exercise {", ".join(sorted(wrong))}: `list` names them all.')
    what = dict(chapter=a.chapter, only=a.only or (), notebook=a.notebook)
    if a.file.is_dir():
        marks = mark_folder(a.file, a.seconds, a.workers, **what)
        if a.csv: write_csv(marks, a.csv)
        print(*summary(marks), sep='\n')
        return 0
    marks = mark(a.file, a.seconds, **what)
    print(json.dumps(marks, indent=1, ensure_ascii=False))
    return int(any(r['state'] == 'wrong' for r in marks['exercises']))


def make_parser():
    "The grammar of the command"
    p = argparse.ArgumentParser(prog='python -m tools.exercises', description=__doc__)
    sub = p.add_subparsers(dest='what', required=True)
    c = sub.add_parser('check', help='run your solutions of a chapter')
    c.add_argument('chapter', help='its number, such as 11')
    c.add_argument('file', type=Path, help='Python with your solutions')
    sub.add_parser('list', help='list all exercises with their points')
    sub.add_parser('strip', help='write notebooks without solutions').add_argument('out', type=Path, help='a folder')
    m = sub.add_parser('mark', help="mark a student's file, as JSON (exit code 1 if an answer is wrong), or a folder of them")
    m.add_argument('file', type=Path, help='08_scaler.ipynb, 08_mine.py, or a folder')
    m.add_argument('--chapter', help="its number, such as 08, where the files' names do not begin with it")
    m.add_argument('--only', nargs='+', metavar='NN.N', help='exercises that were asked, such as 01.2 02.2')
    m.add_argument('--notebook', type=Path, help="your own copy of a chapter, with its number in the name and other numbers in it, such as my_85.ipynb")
    m.add_argument('--csv', type=Path, help='where to write a table of a folder')
    m.add_argument('--workers', type=int, default=os.cpu_count(), help='submissions of a folder at a time (%(default)s)')
    m.add_argument('--seconds', type=int, default=60, help="the limit for each answer, in seconds of a processor's time (%(default)s); what only waits has three times as long")
    sub.add_parser('self', help='check that every solution passes and no stub does').add_argument('chapters', nargs='*', help='numbers, or a copy of a chapter such as my_85.ipynb; by default all')
    j = sub.add_parser('judge', help='judge the answers in the standard input, for `mark`')
    j.add_argument('notebook', type=Path)
    j.add_argument('--seconds', type=int)
    return p


def main(argv=None) -> int: # the exit code
    "The command"
    a = make_parser().parse_args(argv)
    if a.what == 'check': return check(a.chapter, a.file)
    if a.what == 'list':
        for e in all_exercises(): print(f'{e.id}  {"●"*e.level:3}  {e.name:26}  {e.title}')
    elif a.what == 'strip':
        a.out.mkdir(parents=True, exist_ok=True)
        for n in notebooks(): strip(n, a.out)
    elif a.what == 'mark': return print_marks(a)
    elif a.what == 'self':
        copies = [Path(c) for c in a.chapters if c.endswith('.ipynb')]
        todo = [e for c in copies for e in exercises(c)] or [e for e in all_exercises() if not a.chapters or e.id[:2] in a.chapters]
        found = own(todo)
        print(*found, f'{len(todo)} exercises, {sum(e.level for e in todo)} points, {len(found)} problems', sep='\n')
        return int(bool(found))
    else:
        others, jobs = json.load(sys.stdin)
        print(json.dumps(judge_all(a.notebook, others, jobs, a.seconds)))
    return 0


if __name__ == '__main__': sys.exit(main())
