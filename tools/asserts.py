"""What a kernel adds to a chapter's asserts: a failed one says what it found, and with
MPCOURSE_RECORD each comparison is written down. An IPython extension, which the course and the
claims load.
"""
import ast, builtins, json, operator, os

SIGNS = {ast.Lt: '<', ast.LtE: '<=', ast.Gt: '>', ast.GtE: '>=', ast.Eq: '==', ast.NotEq: '!='}
HOLDS = {'<': operator.lt, '<=': operator.le, '>': operator.gt, '>=': operator.ge,
         '==': operator.eq, '!=': operator.ne}
FIRST_LOSSES = 5


# --- comparisons ---

def as_number(value):
    "A float, or None for what is no number"
    if hasattr(value, 'detach'): value = value.detach()
    try: return float(value)
    except Exception: return None


class Comparisons(ast.NodeTransformer):
    "Hands each comparison on which an assert stands to `_compared`, with its text"

    def visit_FunctionDef(self, node):
        "Not in checkers of exercises, which compare answers"
        if node.name.startswith('check_'): return node
        return self.generic_visit(node)

    def visit_Assert(self, node):
        "What an assert compares"
        node.test = self.claim(node.test)
        return node

    def claim(self, node):
        "A comparison, those of an `and`, or that of an `all`: one of these makes an assert false"
        match node:
            case ast.BoolOp(op=ast.And()):
                node.values = [self.claim(part) for part in node.values]
            case ast.Call(func=ast.Name(id='all'), args=[ast.GeneratorExp() as each]):
                each.elt = self.claim(each.elt)
            case ast.Compare() if set(map(type, node.ops)) <= set(SIGNS): return self.noted(node)
        return node

    def noted(self, node):
        "The call that compares and notes"
        values = [node.left, *node.comparators]
        texts = [ast.unparse(value) for value in values]
        signs = [SIGNS[type(op)] for op in node.ops]
        call = ast.parse(f'_compared({texts!r}, {signs!r})', mode='eval').body
        for part in ast.walk(call): ast.copy_location(part, node)
        call.args.append(ast.copy_location(ast.List(values, ast.Load()), node))
        return call


def room(left, sign, right):
    "How far a comparison is from its bound; negative where it does not hold"
    return right - left if sign in ('<', '<=') else left - right


class Notes:
    "What the comparisons of the running cell found"

    def __init__(self): self.clear()

    def clear(self, info=None):
        "Before a cell"
        self.found = ''     # by the last comparison that did not hold
        self.seen = {}      # text -> [left, sign, right] of the narrowest

    def compared(self, texts, signs, values):
        "The result of a chain of comparisons"
        for i, sign in enumerate(signs):
            self.note(f'{texts[i]} {sign} {texts[i+1]}', *values[i:i+2], sign)
            held = HOLDS[sign](*values[i:i+2])
            if held: continue
            self.found = f'found {texts[i]} = {values[i]!r:.60}, asked {sign} {texts[i+1]}'
            if repr(values[i+1]) != texts[i+1]: self.found += f' = {values[i+1]!r:.60}'
            break
        return held

    def note(self, text, left, right, sign):
        "Of two sizes, keep the pair that is nearest to its bound"
        if sign in ('==', '!='): return
        left, right = as_number(left), as_number(right)
        if left is None or right is None: return
        before = self.seen.get(text)
        if before and room(*before) <= room(left, sign, right): return
        self.seen[text] = [left, sign, right]


# --- what a variation changes ---

def note_first_losses(losses):
    "Note the first losses from which a chapter goes backward: they tell seeds apart"
    import torch
    def note(loss):
        if len(losses) == FIRST_LOSSES or not isinstance(loss, torch.Tensor): return
        if loss.dim() == 0 and loss != 0: losses.append(loss.item())    # zeros tell no seed
    def noted(function):
        def call(loss, *args, **kwargs):
            note(loss)
            return function(loss, *args, **kwargs)
        return call
    torch.Tensor.backward = noted(torch.Tensor.backward)
    torch.autograd.grad = noted(torch.autograd.grad)


def move_initial_weights(neighbour):
    """Multiply what torch.nn.init draws by 1 + 2⁻²⁰ noise

    Another processor's sums do as much after a step. The noise is a function of the weight, so
    equal weights stay equal.
    """
    import torch
    def moved(init):
        def call(tensor, *args, **kwargs):
            init(tensor, *args, **kwargs)
            with torch.no_grad():
                noise = (tensor.double()*(12345.67*neighbour)).sin()
                return tensor.mul_((1 + 2**-20*noise).to(tensor.dtype))
        return call
    for name in ('uniform_', 'normal_', 'trunc_normal_', 'xavier_uniform_', 'xavier_normal_',
                 'kaiming_uniform_', 'kaiming_normal_', 'orthogonal_'):
        setattr(torch.nn.init, name, moved(getattr(torch.nn.init, name)))


def keep_threads():
    "The threads are the variation's, whatever a chapter asks for"
    import torch
    torch.set_num_threads(int(os.environ['OMP_NUM_THREADS']))
    torch.set_num_threads = lambda n: None


# --- the extension ---

def load_ipython_extension(shell):
    "Loaded by the option extra_extensions"
    notes = Notes()
    builtins._compared = notes.compared
    shell.ast_transformers.append(Comparisons())

    def show_found(shell, kind, error, tb, tb_offset=None):
        if notes.found: error.args = ('; '.join([*map(str, error.args), notes.found]),)
        shell.showtraceback((kind, error, tb), tb_offset=tb_offset)
    shell.set_custom_exc((AssertionError,), show_found)

    shell.events.register('pre_run_cell', notes.clear)
    if 'MPCOURSE_RECORD' in os.environ: record(shell, notes)


def record(shell, notes):
    "Write a line for each cell: its text, its comparisons, the first losses so far"
    losses = []
    note_first_losses(losses)
    keep_threads()
    neighbour = int(os.environ.get('MPCOURSE_NEIGHBOUR', '0'))
    if neighbour: move_initial_weights(neighbour)
    def end(result):
        entry = dict(source=result.info.raw_cell, compared=notes.seen, first=losses)
        with open(os.environ['MPCOURSE_RECORD'], 'a') as f: f.write(json.dumps(entry) + '\n')
    shell.events.register('post_run_cell', end)
