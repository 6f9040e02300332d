"Chapter 05's loop, beside the training step and the callback that grow out of it"
import copy

import pytest
import torch
import torch.nn.functional as F
from mpcourse.formats import same_bits
from mpcourse.recipe import train_fp16
from mpcourse.scaler import StaticScaler
from mpcourse.step import MixedStep
from mpcourse.tensorcore import fp32_accumulate
from mpcourse.toys import batches, deep_sigmoid, digits, get_toy, relu_mlp, train_toy

pytestmark = pytest.mark.library


def recipe(net, opt, S, steps=60, bs=128):
    master = net()
    with fp32_accumulate(): losses = train_fp16(master, opt(master.parameters()), batches(digits(), bs, steps), F.cross_entropy, S)
    return losses, master


@pytest.mark.parametrize('name, S', [('deep_sigmoid', 2.**11), ('deep_sigmoid', 2.**20), ('relu_mlp', 2.**8)])
def test_the_step_is_the_recipe(name, S):
    toy = get_toy(name)
    losses, master = recipe(toy.model, toy.opt, S, bs=toy.bs)
    run = train_toy(name, MixedStep(StaticScaler(S)), steps=60)
    assert run.history['loss'] == losses
    assert all(same_bits(p.data, q.data) for p, q in zip(run.model.parameters(), master.parameters()))


def test_a_skipped_step_leaves_weights_and_state():
    start = relu_mlp()
    master = copy.deepcopy(start)
    opt = torch.optim.Adam(master.parameters())
    with fp32_accumulate(): losses = train_fp16(master, opt, batches(digits(), 64, 3), F.cross_entropy, 2.**60)
    assert len(losses) == 3 and not opt.state
    assert all(same_bits(p.data, q.data) for p, q in zip(start.parameters(), master.parameters()))


def test_without_the_factor_nothing_is_learnt():
    adam = lambda ps: torch.optim.Adam(ps, lr=6e-3)
    means = {S: sum(recipe(deep_sigmoid, adam, S, 200)[0][-20:])/20 for S in (1., 2.**11)}
    assert means[1.] > 2.28 and means[2.**11] < 2.2
