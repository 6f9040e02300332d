"A notebook that was run as one html file that needs nothing else, by nbconvert and templates/"
import ast, re
from copy import deepcopy
from functools import cache
from html import escape
from pathlib import Path

import yaml
from latex2mathml.converter import convert
from nbconvert import HTMLExporter, TemplateExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat.v4 import new_markdown_cell, new_raw_cell
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from traitlets.config import Config

TEMPLATES = Path(__file__).parent/'templates'
STYLES = Path(__file__).parent.parent/'nbs/styles.css', TEMPLATES/'page.css'
MAKERS = *STYLES, TEMPLATES/'course/index.html.j2', Path(__file__)
VIEW = 'application/vnd.jupyter.widget-view+json'
STATE = 'application/vnd.jupyter.widget-state+json'
# the first of them that an output has is shown
KINDS = ['text/html', VIEW, 'image/svg+xml', 'image/png', 'image/jpeg', 'text/markdown',
         'text/latex', 'text/plain']
DPI = 110           # of the course's figures (plots.use_style)
HEAVY = 200_000     # characters of a drawing
# a fence of Quarto's: `::: {.callout-tip}` with a heading below it, or `:::`
FENCE = re.compile(r'^:{3,}[ \t]*\{(?P<options>.*)\}[ \t]*$(?:\s+#+ +(?P<title>.+)$)?'
                   r'|^:{3,}[ \t]*$', re.M)


# --- the source of a cell ---

def as_yaml(directive):
    "YAML of nbdev's `#| hide` and `#| default_exp name`"
    return f'{directive[1]}: {directive[2] or "true"}'


def directives(
    src: str, # a code cell's source
) -> tuple[dict, str]: # what its `#|` lines say (True for a bare word), and the code below them
    "Read the directives that open a cell: Quarto's are YAML, nbdev's are words"
    head = re.match(r'(#\|.*(\n|$)|[ \t]*\n)*', src)[0]
    lines = re.sub(r'^#\| ?', '', head.removesuffix('\n'), flags=re.M)
    lines = re.sub(r'^([\w-]+)(?: +([\w.]+))?$', as_yaml, lines, flags=re.M)
    return yaml.safe_load(lines) or {}, src[len(head):]


def is_hidden(
    options: dict, # a cell's directives
) -> bool: # whether a reader should not see the cell
    "Whether a cell is for the machine only"
    return 'hide' in options or 'default_exp' in options or options.get('include') is False


def statements(code):
    "What Python code says; nothing where a line is IPython's"
    try: return ast.parse(code).body
    except SyntaxError: return []


def is_imports(
    code: str, # Python without directives
) -> bool: # whether it holds imports alone
    "Imports are folded"
    body = statements(code)
    return bool(body) and all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in body)


def is_check(
    code: str, # Python without directives
) -> bool: # whether it ends with an assertion
    "What a chapter has shown is asserted in a cell that most readers skip"
    match statements(code)[-1:]:
        case [ast.For(body=body) | ast.With(body=body)]: return isinstance(body[-1], ast.Assert)
        case [last]: return isinstance(last, ast.Assert)
    return False


# --- outputs ---

def error_of(cell):
    "The error among a cell's outputs, or None"
    for output in cell.get('outputs', []):
        if output.output_type == 'error': return output


def html_of(output):
    "The html of an output, or ''"
    return ''.join(output.get('data', {}).get('text/html', ''))


# --- folds over several cells ---

def shows_imports(cell):
    "Whether a reader sees imports, and nothing else, in a cell"
    if cell.cell_type != 'code' or cell.outputs: return False
    options, code = directives(cell.source)
    return not is_hidden(options) and is_imports(code)


def join_imports(
    cells: list, # of a notebook that was run
) -> list: # the same, where cells of imports that follow each other are one
    "The imports of the library's module and those of its chapter in one fold"
    joined = []
    before = None        # the cell of imports that stands just before, if one does
    for cell in cells:
        if not shows_imports(cell):
            joined.append(cell)
            before = None
        elif before is None:
            joined.append(cell)
            before = cell
        else:
            both = directives(before.source)[1], directives(cell.source)[1]
            before.source = '\n'.join(map(str.strip, both))
    return joined


def fold_earnest(
    cells, # of a notebook
) -> list: # the same, the section In earnest between two more cells
    "Put what makes a chapter's code robust under one fold; it is open if a cell in it has failed"
    start = None
    end = len(cells)
    for place, cell in enumerate(cells):
        if cell.cell_type != 'markdown' or not cell.source.startswith('## '): continue
        if start is not None:
            end = place
            break
        if cell.source.startswith('## In earnest'): start = place + 1
    if start is None: return cells
    section = cells[start:end]
    collapse = str(not any(map(error_of, section))).lower()
    fence = f'::::: {{.callout-note collapse="{collapse}"}}\n\n## Open this section'
    fold = [new_markdown_cell(fence), *section, new_markdown_cell(':::::')]
    return [*cells[:start], *fold, *cells[end:]]


# --- Markdown ---

def mathml(
    tex: str,             # a formula in LaTeX, with or without dollar signs
    display: str='block', # on a line of its own, or 'inline'
) -> str: # MathML, or the source marked as an error
    "Translate a formula to MathML"
    known = re.sub(r'\\(begin|end)\{(?:aligned|align)\}', r'\\\1{align*}', tex.strip().strip('$'))
    unknown = f'<code class="tex-error">{escape(tex)}</code>'
    try: found = convert(known, display=display)
    except Exception: return unknown
    # the converter leaves some of what it does not know as it is
    if '\\' in found or '<mi>&</mi>' in found: return unknown
    return found


def slug(
    text: str, # a heading as html, or the end of a link
) -> str: # the name of its section
    "Lower case and dashes, as Quarto has them"
    plain = re.sub(r'<[^>]+>|&\w+;', '', text).lower().replace('-', ' ')
    return '-'.join(re.sub(r'[^\w\s]', '', plain).split())


class Renderer(IPythonRenderer):
    "nbconvert's Markdown with formulas as MathML, links to pages, and tables that scroll"
    def __init__(self,
        folder: Path,    # where pictures are looked for
        stems: set|None, # of the notebooks whose pages are there; None: all are
    ):
        "A renderer for the pages of a folder"
        super().__init__(escape=False, embed_images=True, path=str(folder))
        self.stems = stems

    def inline_math(self, body): return mathml(body, display='inline')
    def block_math(self, body): return mathml(body)
    def latex_environment(self, name, body):
        return mathml(f'\\begin{{{name}}}{body}\\end{{{name}}}')
    # as it is: nbconvert would close a block that ends in a later cell
    def block_html(self, html): return html + '\n'
    def table(self, text): return f'<div class="scroll"><table>{text}</table></div>\n'

    def heading(self, text, level, **attrs):
        "A heading with a link to itself"
        name = slug(text)
        link = f'<a class="anchor-link" href="#{name}" aria-label="link to this section">#</a>'
        return f'<h{level} id="{name}">{text}{link}</h{level}>\n'

    def link(self, text, url, title=None):
        "A link to a notebook leads to its page, if there is one"
        notebook = re.fullmatch(r'(?:\./)?([\w-]+)\.ipynb(#.*)?', url)
        if not notebook: return super().link(text, url, title)
        stem, section = notebook.groups()
        if self.stems is not None and stem not in self.stems:
            return f'<span class="unmade" title="not run yet">{text}</span>'
        page = f'{stem}.html'
        if section: page += f'#{slug(section)}'
        return super().link(text, page, title)


def markdown(
    src: str,           # Markdown
    renderer: Renderer, # the page's
    inline=False,       # without a paragraph around it, for captions
) -> str: # html
    "Markdown to html"
    html = MarkdownWithMath(renderer).render(src)
    if not inline: return html
    return re.sub(r'^<p>|</p>$', '', html.strip())


def callouts(
    src: str,  # a Markdown cell
    inline,    # Markdown of a title → html
    ends: list # the closing tags of blocks that are open; changed in place
) -> str: # Markdown with html in it
    "Quarto's `:::` lines as html that folds; a block may end in a later cell"
    def as_html(fence):
        if fence['options'] is None:
            if not ends: return ''
            return f'\n\n{ends.pop()}\n\n'
        kind = re.search(r'callout-(\w+)', fence['options'])
        if not kind:
            ends.append('</div>')
            if fence['title']: return f"\n\n<div>\n\n## {fence['title']}\n\n"
            return '\n\n<div>\n\n'
        ends.append('</div></details>')
        state = '' if re.search(r'collapse="?true', fence['options']) else ' open'
        title = inline(fence['title'] or kind[1].capitalize())
        return (f'\n\n<details class="callout {kind[1]}"{state}><summary>{title}</summary>'
                '<div class="callout-body">\n\n')
    return FENCE.sub(as_html, src)


# --- cells ---

def fold_title(
    options: dict, # a cell's directives
    code: str,     # what stands below them
) -> str: # the summary of a folded cell, or ''
    "Imports and the checkers of exercises are folded, and what asks for it"
    if is_imports(code): return 'Imports'
    if options.get('code-fold'): return 'Check' if is_check(code) else 'Code'
    if re.search(r'^def check_', code, re.M): return 'Checker'
    return ''


def in_pixels(size):
    "A width or height in points, as the pixels of the course's figures"
    return f'{size[1]}="{float(size[2])*DPI/72:.0f}"'


def sharpen(
    output: dict, # of a cell that was run; changed in place
):
    "Of a figure's two forms keep the vectors, at the size of the pixels; a heavy one stays pixels"
    data = output.get('data', {})
    svg = ''.join(data.get('image/svg+xml', ''))
    if not svg: return
    if len(svg) > HEAVY:     # as one of many points
        del data['image/svg+xml']
        return
    data.pop('image/png', None)
    data['image/svg+xml'] = re.sub(r'(width|height)="([\d.]+)pt"', in_pixels, svg, count=2)


def set_view(
    cell: dict,  # a code cell that was run
    module: str, # that the notebook exports
):
    "Note in a code cell what its page shows of it; an error is never hidden"
    options, code = directives(cell.source)
    run = cell.metadata.get('mpcourse', {})
    if is_hidden(options) or 'hide_output' in options or options.get('output') is False:
        cell.outputs = [output for output in cell.outputs if output.output_type == 'error']
    for output in cell.outputs: sharpen(output)
    is_quiet = is_hidden(options) or options.get('echo') is False or 'hide_input' in options
    has_code = bool(code.strip())
    view = dict(shown=has_code and not is_quiet, fold=fold_title(options, code),
                caption=options.get('fig-cap', ''), note=run.get('skipped'),
                failed=0, line=None, module='')
    if {'export', 'exporti', 'exports'} & set(options): view['module'] = module
    if 'failed' in run: view.update(shown=has_code, fold='', caption='', failed=run['failed'])
    if run.get('line'):
        above = cell.source.count('\n') - code.count('\n')
        view['line'] = run['line'] - above
    cell.metadata['alt'] = options.get('fig-alt') or options.get('fig-cap')
    cell.metadata['view'] = view
    cell.source = code


def set_views(
    nb,     # a notebook that was run
    inline, # Markdown of a title → html
    ch,     # its chapter
) -> dict: # the same notebook
    "Make the cells of a notebook ready for the template"
    ends = []
    nb.cells = fold_earnest(join_imports(nb.cells))
    if nb.cells and nb.cells[0].cell_type == 'markdown':    # the page says these by itself
        header_lines = r'^(# .*|>.*|- [\w-]+: .*)$'
        nb.cells[0].source = re.sub(header_lines, '', nb.cells[0].source, flags=re.M)
    for cell in nb.cells:
        if cell.cell_type == 'code': set_view(cell, ch.module)
        elif cell.cell_type == 'markdown': cell.source = callouts(cell.source, inline, ends)
    if ends: nb.cells.append(new_markdown_cell('\n'.join(reversed(ends))))
    return nb


def colour(
    code: str,      # Python
    line: int|None, # the line to mark, counted from 1
) -> str: # html with pygments' classes
    "Colour code"
    lead = len(code) - len(code.lstrip('\n'))
    marked = [line - lead] if line else []
    formatter = HtmlFormatter(hl_lines=marked)
    return highlight(code.strip('\n'), PythonLexer(stripnl=False), formatter)


# --- widgets ---

def saved_html(
    model_id: str, # a widget model's id, with or without 'IPY_MODEL_'
    state: dict,   # id → model, as the notebook saved it
) -> str: # html
    "A saved widget as the browser's own controls"
    model = state.get(model_id.removeprefix('IPY_MODEL_'), {})
    values = model.get('state', {})
    name = model.get('model_name', '')
    if 'children' in values:
        inner = [saved_html(child, state) for child in values['children']]
        return f'<div class="w-box">{"".join(inner)}</div>'
    value = values.get('value', '')
    if name.startswith('HTML'): return str(value)
    if values.get('_options_labels'): value = values['_options_labels'][values['index']]
    control = f'<output>{escape(str(value))}</output>'
    if 'Slider' in name and 'min' in values:
        limits = f'min="{values["min"]}" max="{values.get("max")}"'
        control = f'<input type="range" {limits} value="{value}" disabled>{control}'
    label = escape(values.get('description') or '')
    return f'<label class="w-row"><span>{label}</span>{control}</label>'


def widget_html(
    output: dict, # an output of a cell that shows a widget
    state: dict,  # the notebook's widget state: id → model
) -> str: # html
    "What a widget shows without a kernel: the html that it brought along, or its saved controls"
    html = html_of(output)
    if html: return html
    controls = saved_html(output['data'][VIEW]['model_id'], state)
    note = '<p class="w-note">Shown as it was saved. It moves in <code>make lab</code>.</p>'
    return f'<div class="widget">{controls}{note}</div>'


# --- pages ---

def headings(
    html: str, # of a page's cells
) -> list: # (id, html) of each section
    "What the table of contents lists"
    found = re.findall(r'<h2 id="([^"]*)">(.*?)<a class="anchor-link"', html, re.S)
    return [(name, re.sub(r'</?a\b[^>]*>', '', text)) for name, text in found]


@cache
def exporter():
    "The one that makes all pages: its templates are compiled once"
    return HTMLExporter(
        template_name='course', extra_template_basedirs=[str(TEMPLATES)], default_preprocessors=[],
        exclude_input_prompt=True, exclude_output_prompt=True,
        config=Config(NbConvertBase=dict(display_data_priority=KINDS)))


def page_html(
    nb,              # a notebook that was run
    ch,              # its chapter
    stems: set|None=None, # of the notebooks whose pages are there; None: all are
    **more, # for the template: prev and next chapter, whether it is fresh, runs for the index
) -> str: # a whole html document
    "A notebook that was run as one html file that needs nothing else"
    renderer = Renderer(ch.path.parent, stems)
    state = nb.metadata.get('widgets', {}).get(STATE, {}).get('state', {})
    def block(src): return markdown(src, renderer)
    def inline(src): return markdown(src, renderer, inline=True)
    def widget(output): return widget_html(output, state)
    filters = dict(markdown2html=block, inline=inline, headings=headings, mathml=mathml,
                   colour=colour, highlight_code=colour, widget=widget)
    for name, function in filters.items(): exporter().register_filter(name, function)
    css = ''.join(path.read_text(encoding='utf-8') for path in STYLES)
    resources = dict(ch=ch, run=nb.metadata.get('mpcourse', {}), css=css, **more)
    # HTMLExporter's own method parses the page once more, for alt texts: three times as long
    nb = set_views(deepcopy(nb), inline, ch)
    return TemplateExporter.from_notebook_node(exporter(), nb, resources)[0]


def index_html(
    nb,          # the index notebook, run
    ch,          # its chapter
    runs: list,  # dicts for the template: ch, run (a record or None), fresh, part
) -> str: # a whole html document
    "The first page: the index notebook, with times and states in place of its table of chapters"
    table = next((cell for cell in nb.cells if '## The chapters' in cell.source), None)
    if table is None:
        table = new_markdown_cell('## The chapters')
        nb.cells.append(table)
    table.source = re.sub(r'^\|.*\n?', '', table.source, flags=re.M)
    place = nb.cells.index(table) + 1
    nb.cells.insert(place, new_raw_cell(metadata={'raw_mimetype': 'text/html'}))
    made = [row['ch'].stem for row in runs if row['run']]
    return page_html(nb, ch, {'index', *made}, runs=runs, fresh=True)
