"A notebook that was run as one html file that needs nothing else: nbconvert, templates/course and two style sheets"
import ast, re
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
VIEW, STATE = (f'application/vnd.jupyter.widget-{kind}+json' for kind in ('view', 'state'))
KINDS = 'text/html', VIEW, 'image/svg+xml', 'image/png', 'image/jpeg', 'text/markdown', 'text/latex', 'text/plain'
DPI, HEAVY = 110, 200_000     # of the course's figures (plots.use_style); characters of a drawing


def directives(
    src: str, # a code cell's source
) -> tuple[dict, str]: # what its `#|` lines say (True for a bare word), and the code below them
    "Read the directives that open a cell: Quarto's are YAML, nbdev's are words"
    head = re.match(r'(#\|.*(\n|$)|[ \t]*\n)*', src)[0]
    lines = [re.sub(r'^#\| ?', '', line) for line in head.splitlines()]
    words = [re.sub(r'^([\w-]+)(?: +([\w.]+))?$', lambda m: f'{m[1]}: {m[2] or "true"}', line) for line in lines]
    return yaml.safe_load('\n'.join(words)) or {}, src[len(head):]


def is_hidden(
    d: dict, # a cell's directives
) -> bool: # whether a reader should not see the cell
    "Whether a cell is for the machine only"
    return 'hide' in d or 'default_exp' in d or d.get('include') is False


def is_imports(
    code: str, # Python without directives
) -> bool: # whether it holds imports alone
    "Imports are folded"
    try: body = ast.parse(code).body
    except SyntaxError: return False
    return bool(body) and all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in body)


def is_check(
    code: str, # Python without directives
) -> bool: # whether it ends with an assertion
    "What a chapter has shown is asserted in a cell that most readers skip"
    try: last = ast.parse(code).body[-1]
    except (SyntaxError, IndexError): return False
    if isinstance(last, (ast.For, ast.With)): last = last.body[-1]
    return isinstance(last, ast.Assert)


def join_imports(
    cells: list, # of a notebook that was run
) -> list: # the same, where cells of imports that follow each other are one
    "The imports of the library's module and those of its chapter in one fold"
    out = []
    for c in cells:
        d, code = directives(c.source) if c.cell_type == 'code' else ({}, '')
        alone = c.cell_type == 'code' and not (c.outputs or is_hidden(d)) and is_imports(code)
        if alone and out and out[-1].get('imports'):
            out[-1].source = '\n'.join(directives(x.source)[1].strip() for x in (out[-1], c))
        else: out.append(c)
        if alone: out[-1]['imports'] = True
    for c in out: c.pop('imports', None)
    return out


def fold_earnest(
    cells, # of a notebook
) -> list: # the same, the section In earnest between two more cells
    "Put what makes a chapter's code robust under one fold; it is open where a cell in it has failed"
    def begins(c, heading): return c.cell_type == 'markdown' and c.source.startswith(heading)
    start = next((i for i, c in enumerate(cells, 1) if begins(c, '## In earnest')), None)
    if start is None: return cells
    end = next((i for i in range(start, len(cells)) if begins(cells[i], '## ')), len(cells))
    failed = any(o.output_type == 'error' for c in cells[start:end] for o in c.get('outputs', ()))
    opening = f'::::: {{.callout-note collapse="{str(not failed).lower()}"}}\n\n## Open this section'
    return [*cells[:start], new_markdown_cell(opening), *cells[start:end], new_markdown_cell(':::::'), *cells[end:]]


# --- Markdown ---

def mathml(
    tex: str,            # a formula in LaTeX, with or without dollar signs
    display: bool=True,  # on a line of its own
) -> str: # MathML, or the source marked as an error
    "Translate a formula to MathML"
    known = re.sub(r'\\(begin|end)\{(?:aligned|align)\}', r'\\\1{align*}', tex.strip().strip('$'))
    try: res = convert(known, display='block' if display else 'inline')
    except Exception: res = '\\'
    return f'<code class="tex-error">{escape(tex)}</code>' if '\\' in res or '<mi>&</mi>' in res else res


def slug(
    text: str, # a heading as html, or the end of a link
) -> str: # the name of its section
    "Lower case and dashes, as Quarto has them"
    plain = re.sub(r'<[^>]+>|&\w+;', '', text).lower().replace('-', ' ')
    return '-'.join(re.sub(r'[^\w\s]', '', plain).split())


class Renderer(IPythonRenderer):
    "nbconvert's Markdown with formulas as MathML, links to pages, and tables that scroll"
    def __init__(self,
        folder: Path,     # where pictures are looked for
        pages: dict|None, # stem of a notebook → whether its page is there; None: all are
    ):
        super().__init__(escape=False, embed_images=True, path=str(folder))
        self.pages = pages

    def inline_math(self, body): return mathml(body, display=False)
    def block_math(self, body): return mathml(body)
    def latex_environment(self, name, body): return mathml(f'\\begin{{{name}}}{body}\\end{{{name}}}')
    def block_html(self, html): return html + '\n'  # as it is: nbconvert would close a block that ends in a later cell
    def heading(self, text, level, **attrs):
        name = slug(text)
        return f'<h{level} id="{name}">{text}<a class="anchor-link" href="#{name}" aria-label="link to this section">#</a></h{level}>\n'
    def table(self, text): return f'<div class="scroll"><table>{text}</table></div>\n'

    def link(self, text, url, title=None):
        "A link to a notebook leads to its page, if there is one"
        m = re.fullmatch(r'(?:\./)?([\w-]+)\.ipynb(#.*)?', url)
        if m and self.pages is not None and not self.pages.get(m[1]):
            return f'<span class="unmade" title="not run yet">{text}</span>'
        if m: url = f'{m[1]}.html' + (f'#{slug(m[2])}' if m[2] else '')
        return super().link(text, url, title)


def markdown(
    src: str,           # Markdown
    renderer: Renderer, # the page's
    inline=False,       # without a paragraph around it, for captions
) -> str: # html
    "Markdown to html"
    html = MarkdownWithMath(renderer).render(src)
    return re.sub(r'^<p>|</p>$', '', html.strip()) if inline else html


def callouts(
    src: str,  # a Markdown cell
    inline,    # Markdown of a title → html
    ends: list # the closing tags of blocks that are open; changed in place
) -> str: # Markdown with html in it
    "Quarto's `:::` lines as html that folds; a block may end in a later cell"
    def replace(m):
        if m[1] is None: return f'\n\n{ends.pop()}\n\n' if ends else ''
        kind = re.search(r'callout-(\w+)', m[1])
        ends.append('</div></details>' if kind else '</div>')
        if not kind: return '\n\n<div>\n\n'
        is_open = '' if re.search(r'collapse="?true', m[1]) else ' open'
        title = inline(m[2] or kind[1].capitalize())
        return (f'\n\n<details class="callout {kind[1]}"{is_open}><summary>{title}</summary>'
                '<div class="callout-body">\n\n')
    return re.sub(r'^:{3,}[ \t]*\{(.*)\}[ \t]*$(?:\s+#+ +(.+)$)?|^:{3,}[ \t]*$', replace, src, flags=re.M)


# --- cells ---

def fold_title(
    d: dict,   # a cell's directives
    code: str, # what stands below them
) -> str: # the summary of a folded cell, or ''
    "Imports and the checkers of exercises are folded, and what asks for it"
    if is_imports(code): return 'Imports'
    if d.get('code-fold'): return 'Check' if is_check(code) else 'Code'
    return 'Checker' if re.search(r'^def check_', code, re.M) else ''


def sharpen(
    output: dict, # of a cell that was run; changed in place
):
    "Of a figure's two forms keep the vectors, at the size of the pixels; a heavy one, as of many points, stays pixels"
    data = output.get('data', {})
    svg = ''.join(data.get('image/svg+xml', ''))
    if not svg: return
    if len(svg) > HEAVY: del data['image/svg+xml']
    else:
        def in_pixels(m): return f'{m[1]}="{float(m[2])*DPI/72:.0f}"'
        data.pop('image/png', None)
        data['image/svg+xml'] = re.sub(r'(width|height)="([\d.]+)pt"', in_pixels, svg, count=2)


def set_view(
    cell: dict,  # a code cell that was run
    module: str, # that the notebook exports
):
    "Note in a code cell what its page shows of it; an error is never hidden"
    d, code = directives(cell.source)
    run = cell.metadata.get('mpcourse', {})
    failed, heads = run.get('failed', 0), cell.source.count('\n') - code.count('\n')
    if is_hidden(d) or 'hide_output' in d or d.get('output') is False:
        cell.outputs = [o for o in cell.outputs if o.output_type == 'error']
    for o in cell.outputs: sharpen(o)
    is_quiet = is_hidden(d) or d.get('echo') is False or 'hide_input' in d
    exported = {'export', 'exporti', 'exports'} & set(d)
    cell.metadata['alt'] = d.get('fig-alt') or d.get('fig-cap')
    cell.metadata['view'] = dict(
        shown=bool(code.strip()) and (failed or not is_quiet), fold='' if failed else fold_title(d, code),
        failed=failed, line=run.get('line') and run['line'] - heads, note=run.get('skipped'),
        module=module if exported else '', caption='' if failed else d.get('fig-cap', ''))
    cell.source = code


def set_views(
    nb,   # a notebook that was run
    md,   # Markdown → html
    ch,   # its chapter
) -> dict: # the same notebook
    "Make the cells of a notebook ready for the template"
    ends = []
    nb.cells = fold_earnest(join_imports(nb.cells))
    if nb.cells and nb.cells[0].cell_type == 'markdown':
        nb.cells[0].source = re.sub(r'^(# .*|>.*|- [\w-]+: .*)$', '', nb.cells[0].source, flags=re.M)
    for c in nb.cells:
        if c.cell_type == 'code': set_view(c, ch.module)
        elif c.cell_type == 'markdown': c.source = callouts(c.source, lambda s: md(s, inline=True), ends)
    if ends: nb.cells.append(new_markdown_cell('\n'.join(reversed(ends))))
    return nb


def colour(
    code: str,      # Python
    line: int|None, # the line to mark, counted from 1
) -> str: # html with pygments' classes
    "Colour code"
    lead = len(code) - len(code.lstrip('\n'))
    formatter = HtmlFormatter(hl_lines=[line - lead] if line else [])
    return highlight(code.strip('\n'), PythonLexer(stripnl=False), formatter)


# --- widgets ---

def saved_html(
    mid: str,    # a widget model's id, with or without 'IPY_MODEL_'
    state: dict, # id → model, as the notebook saved it
) -> str: # html
    "A saved widget as the browser's own controls"
    model = state.get(mid.removeprefix('IPY_MODEL_'), {})
    s, name = model.get('state', {}), model.get('model_name', '')
    if 'children' in s: return f'<div class="w-box">{"".join(saved_html(c, state) for c in s["children"])}</div>'
    if name.startswith('HTML'): return str(s.get('value', ''))
    value = s['_options_labels'][s['index']] if s.get('_options_labels') else s.get('value', '')
    slider = f'<input type="range" min="{s.get("min")}" max="{s.get("max")}" value="{value}" disabled>'
    shown = f'{slider if "Slider" in name and "min" in s else ""}<output>{escape(str(value))}</output>'
    return f'<label class="w-row"><span>{escape(s.get("description") or "")}</span>{shown}</label>'


def widget_html(
    output: dict, # an output of a cell that shows a widget
    state: dict,  # the notebook's widget state: id → model
) -> str: # html
    "What a widget shows without a kernel: the html that it brought along, or its saved controls"
    if 'text/html' in output['data']: return ''.join(output['data']['text/html'])
    note = '<p class="w-note">Shown as it was saved. It moves in <code>make lab</code>.</p>'
    return f'<div class="widget">{saved_html(output["data"][VIEW]["model_id"], state)}{note}</div>'


# --- pages ---

def headings(
    html: str, # of a page's cells
) -> list: # (id, html) of each section
    "What the table of contents lists"
    found = re.findall(r'<h2 id="([^"]*)">(.*?)<a class="anchor-link"', html, re.S)
    return [(name, re.sub(r'</?a\b[^>]*>', '', text)) for name, text in found]


def page_html(
    nb,              # a notebook that was run
    ch,              # its chapter
    pages: dict|None=None, # stem of a notebook → whether its page is there; None: all are
    **more,          # for the template: prev and next chapter, whether it is fresh, runs for the index
) -> str: # a whole html document
    "A notebook that was run as one html file that needs nothing else"
    renderer = Renderer(ch.path.parent, pages)
    state = nb.metadata.get('widgets', {}).get(STATE, {}).get('state', {})
    def md(src, inline=False): return markdown(src, renderer, inline)
    filters = dict(markdown2html=md, inline=lambda s: md(s, inline=True), headings=headings, mathml=mathml,
                   colour=colour, highlight_code=colour, widget=lambda output: widget_html(output, state))
    exporter = HTMLExporter(
        template_name='course', extra_template_basedirs=[str(TEMPLATES)], filters=filters, exclude_input_prompt=True,
        exclude_output_prompt=True, config=Config(NbConvertBase=dict(display_data_priority=list(KINDS))))
    exporter.register_preprocessor(lambda nb, res: (set_views(nb, md, ch), res), enabled=True)
    css = ''.join(f.read_text(encoding='utf-8') for f in STYLES)
    run = nb.metadata.get('mpcourse', {})
    # HTMLExporter's own method would parse the page once more, to add alt texts, and take three times as long
    return TemplateExporter.from_notebook_node(exporter, nb, dict(ch=ch, run=run, css=css, **more))[0]


def index_html(
    nb,          # the index notebook, run
    ch,          # its chapter
    runs: list,  # dicts for the template: ch, run (a record or None), fresh, part
) -> str: # a whole html document
    "The first page: the index notebook, with times and states in place of its table of chapters"
    i = next((i for i, c in enumerate(nb.cells, 1) if '## The chapters' in c.source), None)
    if i is None: nb.cells.append(new_markdown_cell('## The chapters'))
    else: nb.cells[i-1].source = re.sub(r'^\|.*\n?', '', nb.cells[i-1].source, flags=re.M)
    nb.cells.insert(i or len(nb.cells), new_raw_cell(metadata={'raw_mimetype': 'text/html'}))
    pages = {'index': True, **{r['ch'].stem: bool(r['run']) for r in runs}}
    return page_html(nb, ch, pages, runs=runs, fresh=True)
