"""Do real architectures work with all of it? (appendix, real models)

Random weights from small configurations of Hugging Face's and torch's own models: their logits in
FP16 against FP32, twenty steps with everything that this course builds, and what was saved and
resumed. Needs transformers (the extra `dev`).
"""
import copy, sys, tempfile, warnings
from pathlib import Path

import torch, torch.nn.functional as F
from torch import nn

from mpcourse.als import ALSScaler
from mpcourse.checkpoint import load_training_state, save_training_state
from mpcourse.dynamic import DynamicScaler
from mpcourse.fp8 import simulate_fp8
from mpcourse.gradscaler import GradScaler
from mpcourse.half import cast as to_half, model_to_half
from mpcourse.monitor import TensorCollector
from mpcourse.step import MixedStep
from mpcourse.tensorcore import fp32_accumulate
from mpcourse.toys import seeded

STEPS = 20


class Logits(nn.Module):
    "A Hugging Face model whose output is its logits"
    def __init__(self, model, name='input_ids', **more):
        super().__init__()
        self.model, self.name, self.more = model, name, more

    def forward(self, x, labels=None):
        more = {n: make(x) for n, make in self.more.items()}
        out = self.model(**{self.name: x}, **more).logits
        return out if labels is None else dict(loss=F.cross_entropy(out.float().flatten(0, -2), labels.flatten()), logits=out)


class Recurrent(nn.Module):
    "Symbols through a recurrent net"
    def __init__(self, kind):
        super().__init__()
        self.embed, self.net, self.head = nn.Embedding(128, 64), kind(64, 64, 2, batch_first=True), nn.Linear(64, 128)

    def forward(self, x): return self.head(self.net(self.embed(x))[0])


class Translator(nn.Module):
    "torch's own transformer, with a padding mask"
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(128, 64), nn.Linear(64, 128)
        self.net = nn.Transformer(64, 4, 2, 2, 128, dropout=0., batch_first=True)

    def forward(self, x):
        e, pad = self.embed(x), torch.arange(x.shape[1], device=x.device) >= x.shape[1] - 5
        pad = pad.expand(len(x), -1)
        return self.head(self.net(e, e, src_key_padding_mask=pad, memory_key_padding_mask=pad))


def config(name, **numbers):
    "A configuration of transformers, without dropout"
    # transformers would import it, and it may be of another torch
    sys.modules.setdefault('torchvision', None)
    import transformers
    off = {n: 0.
           for n in ('resid_pdrop', 'embd_pdrop', 'attn_pdrop', 'hidden_dropout_prob',
                     'attention_probs_dropout_prob',
                           'dropout_rate', 'attention_dropout') if hasattr(getattr(transformers, name)(), n)}
    return getattr(transformers, name)(**off | numbers)


def built(name, config):
    "A model with random weights"
    import transformers
    return getattr(transformers, name)(config)


def gpt2():
    return Logits(built('GPT2LMHeadModel',
                        config('GPT2Config', vocab_size=128, n_embd=64, n_layer=3, n_head=4,
                               n_positions=64)))


def llama():
    numbers = dict(vocab_size=128, hidden_size=64, intermediate_size=176, num_hidden_layers=3,
                   num_attention_heads=4)
    return Logits(built('LlamaForCausalLM',
                        config('LlamaConfig', num_key_value_heads=2, max_position_embeddings=2048,
                               **numbers)))


def bert():
    numbers = dict(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
                   num_attention_heads=4)
    return Logits(built('BertForMaskedLM',
                        config('BertConfig', max_position_embeddings=64, **numbers)))


def t5():
    numbers = dict(vocab_size=128, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    model = built('T5ForConditionalGeneration',
                  config('T5Config', decoder_start_token_id=0, **numbers))
    return Logits(model, decoder_input_ids=lambda x: x)


def vit():
    numbers = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=3,
                   num_attention_heads=4)
    return Logits(built('ViTForImageClassification',
                        config('ViTConfig', image_size=32, patch_size=8, num_labels=128,
                               **numbers)), 'pixel_values')


def resnet():
    numbers = dict(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type='basic',
                   num_labels=128)
    return Logits(built('ResNetForImageClassification', config('ResNetConfig', **numbers)),
                  'pixel_values')


MODELS = {'GPT-2': gpt2, 'LLaMA': llama, 'LLaMA, 2,048 tokens': llama, 'BERT': bert, 'T5': t5,
          'ViT': vit, 'ResNet': resnet,
          'nn.Transformer': Translator, 'LSTM': lambda: Recurrent(nn.LSTM), 'GRU': lambda: Recurrent(nn.GRU)}
ROWS, SEEDS = list(MODELS), range(3)


def problem(row, seed):
    "A model and a batch to learn by heart"
    warnings.simplefilter('ignore')
    with seeded(seed):
        model = MODELS[row]()
        if row in ('ViT', 'ResNet'): return model, torch.randn(8, 3, 32, 32), torch.randint(0, 128, (8,))
        shape = (1, 2048) if '2,048' in row else (4, 32)
        return model, torch.randint(0, 128, shape), torch.randint(0, 128, shape)


def loss_func(logits, y): return F.cross_entropy(logits.float().flatten(0, -2), y.flatten())


def off(a, b):
    "Relative error of logits"
    return ((a.float() - b).norm()/b.norm()).item()


@torch.no_grad()
def errors(model, x):
    "Logits in evaluation mode, against FP32"
    model.eval()
    want = model(x).float()
    with fp32_accumulate(), torch.autocast('cpu', torch.float16): cast = model(x)
    with fp32_accumulate(), torch.autocast('cpu', torch.bfloat16): bf16 = model(x)
    with fp32_accumulate(): half = model_to_half(copy.deepcopy(model))(to_half(x, torch.float16))
    found = dict(half=off(half, want), autocast=off(cast, want), bf16=off(bf16, want))
    return found | dict(fp8=off(in_fp8(model)(x), want))


def in_fp8(model):
    "The model in eight bits; recurrent nets, which compute in one piece, stay as they are, by name"
    return simulate_fp8(model, keep=('net',) if isinstance(model, Recurrent) else ())


def trained(step, model, x, y, steps=STEPS, opt=None):
    "The losses of some steps on one batch"
    model.train()
    opt = opt or torch.optim.Adam(model.parameters(), lr=1e-3)
    return [float(step(model, x, y, opt, loss_func)['loss']) for _ in range(steps)]


def in_fp32(model, xb, yb, opt, loss_func):
    opt.zero_grad()
    loss = loss_func(model(xb), yb)
    loss.backward()
    opt.step()
    return dict(loss=loss.item())


def by_gradscaler():
    "torch's documented loop with our scaler"
    scaler = GradScaler()
    def step(model, xb, yb, opt, loss_func):
        opt.zero_grad()
        with fp32_accumulate(), torch.autocast('cpu', torch.float16):
            loss = loss_func(model(xb), yb)
        with fp32_accumulate(): scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        return dict(loss=loss.item())
    return step


def resumed(model, x, y):
    "Is a training that was saved after ten steps and loaded into other objects the one that went on?"
    first, opt, step = copy.deepcopy(model), None, MixedStep(DynamicScaler())
    opt = torch.optim.Adam(first.parameters(), lr=1e-3)
    trained(step, first, x, y, 10, opt)
    with tempfile.TemporaryDirectory() as folder:
        save_training_state(Path(folder)/'x.ckpt', first, opt, step.scaler)
        want = trained(step, first, x, y, 5, opt)
        again, step = copy.deepcopy(model), MixedStep(DynamicScaler())
        opt = torch.optim.Adam(again.parameters(), lr=1e-3)
        load_training_state(Path(folder)/'x.ckpt', again, opt, step.scaler)
        return want == trained(step, again, x, y, 5, opt)


def checkpointed(model, x, y):
    "The largest relative difference that gradient checkpointing makes in five losses; NaN where the model has none"
    inner = getattr(model, 'model', model)
    if not getattr(inner, 'supports_gradient_checkpointing', False): return float('nan')
    plain = trained(MixedStep(DynamicScaler()), copy.deepcopy(model), x, y, 5)
    model = copy.deepcopy(model)
    model.model.gradient_checkpointing_enable()
    again = trained(MixedStep(DynamicScaler()), model, x, y, 5)
    return max(abs(a - b)/a for a, b in zip(plain, again))


def by_trainer(model, x, y):
    "The last loss of Hugging Face's Trainer with our scaler"
    from transformers import PrinterCallback, Trainer, TrainingArguments
    losses, scaler = [], GradScaler()
    class Ours(Trainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self.accelerator.scaler = scaler
        def compute_loss(self, *args, **kw):
            with fp32_accumulate(), torch.autocast('cpu', torch.float16):
                loss = super().compute_loss(*args, **kw)
            losses.append((loss[0] if isinstance(loss, tuple) else loss).item())
            return loss
    examples = [{'x': a, 'labels': b} for a, b in zip(x, y)]*STEPS
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, use_cpu=True, max_steps=STEPS, learning_rate=1e-3,
                                 lr_scheduler_type='constant',
                                 max_grad_norm=0, report_to='none', save_strategy='no', logging_strategy='no', log_level='error',
                                 disable_tqdm=True, per_device_train_batch_size=len(x))
        trainer = Ours(model, args, train_dataset=examples)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return losses[-1]


def run(row, seed):
    "Errors of logits, last losses, tensors seen, and what a resumed and a checkpointed training lose"
    model, x, y = problem(row, seed)
    def fresh(): return copy.deepcopy(model)
    told = dict(parameters=sum(p.numel() for p in model.parameters()), **errors(fresh(), x))
    if '2,048' in row: return told
    told['start'] = loss_func(model(x), y).item()
    told['FP32'] = trained(in_fp32, fresh(), x, y)[-1]
    told['MixedStep'] = trained(MixedStep(DynamicScaler()), fresh(), x, y)[-1]
    told['GradScaler'] = trained(by_gradscaler(), fresh(), x, y)[-1]
    told['ALS'] = trained(MixedStep(ALSScaler()), fresh(), x, y)[-1]
    told['FP8'] = trained(in_fp32, in_fp8(fresh()), x, y)[-1]
    if hasattr(model, 'more'): told['Trainer'] = by_trainer(fresh(), x, y)
    watched = fresh()
    with TensorCollector(watched, every=5) as collector:
        step = MixedStep(DynamicScaler())
        opt = torch.optim.Adam(watched.parameters(), lr=1e-3)
        for _ in range(6):
            step(watched, x, y, opt, loss_func)
            collector.step()
    told['tensors seen'] = len(collector.frame())/2
    return told | dict(resumed=resumed(model, x, y), checkpointed=checkpointed(model, x, y))


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
