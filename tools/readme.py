"""Tables that notebooks hold, and README.md from the index notebook: `python -m tools.readme`

The tables list chapters, exercises and names. README.md shows what the index notebook printed.
"""
import ast, base64, json, re
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from tools.course import chapters
from tools.exercises import all_exercises
from tools.pages import directives, html_of, is_hidden

ROOT = Path(__file__).resolve().parent.parent
LOCAL = r'(?!https?:|/|#|\.\./|mailto:)'


def first_sentence(text):
    "Up to its full stop, without it"
    return re.split(r'(?<=[.?!]) ', text)[0].rstrip('.')


def chapter_table(
    nbs: Path=ROOT/'nbs', # the folder of notebooks
) -> str: # Markdown
    "The main line: number, title, minutes, promise; all other chapters are two lines"
    rows = ['| | chapter | minutes | in short |', '|---|---|--:|---|']
    others = dict(Further=[], Appendix=[])
    heading = ''
    minutes = 0
    for ch in chapters(nbs)[1:]:
        part, _, title = ch.part.partition(' · ')
        if not title or not ch.main:
            kind = 'Further'
            if not title: kind = 'Appendix'
            others[kind].append(f'{ch.number} [{ch.title}]({ch.path.name})')
            continue
        if title != heading:
            rows.append(f'| **{part.removeprefix("Part ")}** | **{title}** | |  |')
            heading = title
        minutes += int(ch.minutes or 0)
        link = f'[{ch.title}]({ch.path.name})'
        rows.append(f'| {ch.number} | {link} | {ch.minutes} | {first_sentence(ch.promise)} |')
    rows.append(f'| | together | {minutes} | at 200 words or eight lines of code a minute |')
    for kind, links in others.items():
        if links: rows += ['', f'{kind}: {" · ".join(links)}.']
    return '\n'.join(rows)


def exercise_table(
    nbs: Path=ROOT/'nbs', # not used: the exercises are those of this clone
) -> str: # Markdown
    "All exercises: number, title, points, and the name of what is to be written"
    rows = ['| | exercise | points | to write |', '|---|---|--:|---|']
    for exercise in all_exercises():
        link = f'[{exercise.id}]({exercise.notebook.name}#exercises)'
        rows.append(f'| {link} | {exercise.title} | {exercise.level} | `{exercise.name}` |')
    return '\n'.join(rows)


def public_definitions(
    text: str, # of a module
) -> list: # nodes of functions and classes
    "What a module defines for its users, but for methods that `@patch` adds"
    found = []
    for node in ast.parse(text).body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name[0] == '_': continue
        if 'patch' not in ''.join(map(ast.dump, node.decorator_list)): found.append(node)
    return found


def name_table(
    nbs: Path=ROOT/'nbs', # the folder of notebooks
) -> str: # Markdown
    "All public names of the library: chapter, and the first line of the docstring"
    rows = {}
    for path in sorted((nbs.parent/'mpcourse').glob('[a-z]*.py')):
        text = path.read_text(encoding='utf-8')
        source = re.search(r'File to edit: \.\./nbs/(\w+\.ipynb)', text)
        if not source: continue
        notebook = source[1]
        for node in public_definitions(text):
            first = (ast.get_docstring(node) or '').partition('\n')[0].replace('|', '\\|')
            rows[node.name] = f'| `{node.name}` | [{notebook[:2]}]({notebook}) | {first} |'
    head = ['| name | chapter | what it is |', '|---|---|---|']
    return '\n'.join([*head, *map(rows.get, sorted(rows, key=str.lower))])


TABLES = { # notebook -> the heading of a cell, and what makes the table below it
    'index.ipynb': ('## The chapters', chapter_table),
    '96_teaching.ipynb': ('## The exercises', exercise_table),
    '99_glossary.ipynb': ('## All names', name_table)}


def dumps(nb):
    "A notebook as its file has it: sources in lines, as nbformat writes them"
    for cell in nb['cells']: cell['source'] = ''.join(cell['source']).splitlines(True)
    return json.dumps(nb, indent=1, ensure_ascii=False) + '\n'


def with_table(
    text: str,    # of a notebook
    heading: str, # of the cell with the table
    table: str,   # Markdown
) -> str: # the same text with a current table
    "Put the current table in the place of the old one"
    nb = json.loads(text)
    for cell in nb['cells']:
        source = ''.join(cell['source'])
        if not source.startswith(heading): continue
        pattern = r'(^\|.*\n?)+(\n(Further|Appendix): .*\n?)*'
        source = re.sub(pattern, lambda _: table, source, flags=re.M)
        cell['source'] = source.splitlines(True)
    return dumps(nb)


# --- what a cell shows ---

def slim(
    out: dict, # an output, as the kernel gave it
) -> dict: # the same without what README.md does not show
    "A picture alone, where there is one; no execution counts"
    if out.output_type == 'stream': return out
    if 'image/png' in out.data: out.data = {'image/png': out.data['image/png']}
    out.metadata = {}
    if 'execution_count' in out: out.execution_count = None
    return out


def still(
    out: dict, # an output
) -> dict: # the picture that a live figure holds; another output as it is
    "What stands where scripts do not run"
    png = re.search('<img [^>]*src="data:image/png;base64,([^"]+)"', html_of(out))
    if not png: return out
    return nbformat.v4.new_output('display_data', {'image/png': png[1]})


def is_shown(out):
    "Whether README.md can show an output: no warning, and no script"
    return out.get('name') != 'stderr' and '<script' not in html_of(out)


def keep_shown(
    cell: dict, # a code cell that has been run; changed in place
):
    "Keep the outputs that README.md can show; of a figure that needs a script at most a picture"
    options = directives(cell.source)[0]
    outputs = cell.outputs
    if is_hidden(options): outputs = []
    if options.get('readme') == 'still': outputs = map(still, outputs)
    cell.outputs = list(map(slim, filter(is_shown, outputs)))
    cell.execution_count = None


def executed(
    path: Path, # of a notebook
) -> dict: # the notebook, run anew
    "Run a notebook, and keep what it prints"
    nb = nbformat.read(path, as_version=4)
    resources = dict(metadata=dict(path=str(path.parent)))
    NotebookClient(nb, timeout=600, resources=resources, record_timing=False).execute()
    for cell in nb.cells:
        if cell.cell_type == 'code': keep_shown(cell)
    return nb


# --- README.md ---

def fenced(text, language=''):
    "A block of code in Markdown"
    return f'```{language}\n{text}\n```'


def output_text(
    out: dict, # an output of the index notebook
    save,      # called with a picture's bytes, returns its path for the README
    alt: str,  # the picture's alt text
) -> str: # Markdown
    "An output as Markdown"
    if out.output_type == 'stream': return fenced(out.text.rstrip())
    if 'image/png' in out.data:
        path = save(base64.b64decode(out.data['image/png']))
        return f'![{alt}]({path})'
    rich = out.data.get('text/markdown') or out.data.get('text/html')
    if rich: return rich.strip()
    return fenced(out.data['text/plain'].rstrip())


def cell_text(
    cell: dict, # a cell of the index notebook
    save,       # called with a picture's bytes, returns its path for the README
) -> str: # Markdown, '' for a cell that is not shown
    "A cell as Markdown"
    if cell.cell_type != 'code': return re.sub(r'^:{3,}.*\n?', '', cell.source, flags=re.M).strip()
    options, code = directives(cell.source)
    if is_hidden(options): return ''
    parts = []
    if options.get('echo') is not False:
        shown = fenced(code.strip(), 'python')
        if options.get('code-fold'):
            shown = f'<details><summary>Imports</summary>\n\n{shown}\n\n</details>'
        parts.append(shown)
    for out in cell.outputs: parts.append(output_text(out, save, options.get('fig-alt', '')))
    if cell.outputs and 'fig-cap' in options: parts.append(f'*{options["fig-cap"]}*')
    return '\n\n'.join(parts)


def readme(
    nbs: Path, # the folder of notebooks
    index: dict=None, # the index notebook with its outputs; None: as it is stored
) -> dict: # path → bytes: README.md and the pictures that it shows
    "What `write_readme` writes"
    pictures = {}
    def save(png):
        name = f'images/index_{len(pictures) + 1}.png'
        pictures[nbs/name] = png
        return name
    if index is None: index = nbformat.read(nbs/'index.ipynb', as_version=4)
    parts = [cell_text(cell, save) for cell in index.cells]
    body = '\n\n'.join(filter(None, parts))
    body = re.sub(rf'(\]\(|(?:src|href)="){LOCAL}(?=[^)\s"]+[)"])', rf'\1{nbs.name}/', body)
    body = re.sub(r'\]\(\.\./([^)\s]+\))', r'](\1', body)
    head = f'<!-- made from {nbs.name}/index.ipynb by `make readme`: edit that -->'
    return {nbs.parent/'README.md': f'{head}\n\n{body}\n'.encode(), **pictures}


def current_tables(
    nbs: Path, # the folder of notebooks
) -> dict: # path → bytes
    "The notebooks that hold a table, with a current one"
    files = {}
    for name, (heading, table) in TABLES.items():
        path = nbs/name
        if not path.exists(): continue
        text = with_table(path.read_text(encoding='utf-8'), heading, table(nbs))
        files[path] = text.encode()
    return files


def write_readme(
    nbs: Path=ROOT/'nbs', # the folder of notebooks
) -> list: # the files
    "Bring the tables up to date, run the index, and write README.md and its pictures from it"
    for path, data in current_tables(nbs).items(): path.write_bytes(data)
    index = nbs/'index.ipynb'
    index.write_text(dumps(executed(index)), encoding='utf-8')
    files = readme(nbs)
    for path, data in files.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    return list(files)


def readme_current(
    nbs: Path=ROOT/'nbs', # the folder of notebooks
) -> bool: # whether README.md and its pictures are what the index notebook says
    "Whether the tables and README.md are what `write_readme` would write"
    files = {**current_tables(nbs), **readme(nbs)}
    return all(path.exists() and path.read_bytes() == data for path, data in files.items())


if __name__ == '__main__': print(*write_readme())
