"""What should a warning of vanished gradients do to a training? (chapter 17)

The net with two heads in a Learner, 14 epochs in FP16. In the first three rows the loss scale is 1,
and the first warning does nothing, changes to BF16, or raises the scale to 2^12. The last row needs
no warning: its scale is dynamic from the start.
"""
from fastai.basics import Learner

from mpcourse.callback import quiet_fit, tensor_dls
from mpcourse.dynamic import DynamicScaler
from mpcourse.learner import MonitorCB, WarnCB
from mpcourse.scaler import StaticScaler
from mpcourse.toys import drawings, heads_loss, heads_score, seeded, two_heads


def nothing(verdict, learn):
    "Go on"


def bf16(verdict, learn):
    "Change the format in the middle of a fit"
    learn.mixed_precision_cb.switch(dtype='bf16')


def scale_up(verdict, learn):
    "Change the scaler in the middle of a fit"
    learn.mixed_precision_cb.switch(StaticScaler(2.**12))


ROWS = {'do nothing': (nothing, StaticScaler, 1.), 'BF16': (bf16, StaticScaler, 1.),
        'scale 2^12': (scale_up, StaticScaler, 1.),
        'dynamic from the start': (nothing, DynamicScaler, None)}
SEEDS = range(5)


def run(row, seed):
    "Drawing error, whether there was a warning"
    on_warn, scaler, scale = ROWS[row]
    data = drawings()
    with seeded(seed):
        learn = Learner(tensor_dls(data.train, data.valid, 256), two_heads(seed), loss_func=heads_loss, lr=1e-2)
        watch = MonitorCB(every=5, kinds=('weight_grad', 'activation_grad'), stats=('zeros', 'overflow'))
        learn.to_mixed(scaler(scale)).add_cbs([watch, WarnCB(on_warn)])
        quiet_fit(learn, 14)
    return dict(error=heads_score(learn.model, data)[1], warned=learn.warn_cb.warning is not None)


if __name__ == '__main__':
    from runner import main
    main(run, ROWS, SEEDS)
