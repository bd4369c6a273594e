"""For the Trainer of Hugging Face Transformers: decay groups by what decay can do, and alpha tuned after training."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from betternorm.advice import Diagnosis, diagnose
from betternorm.decay import param_groups
from betternorm.integrations import torchvision as torchvision_support
from betternorm.weighing.batches import evaluating
from betternorm.weighing.result import AlphaSearch
from betternorm.weighing.search import tune_alpha

torchvision_support.ready_if_installed()  # Transformers imports it

from transformers import TrainerCallback  # noqa: E402


class DecayWhereItActs:
    """Mixed into a Trainer, it decays gamma and beta in the layers where that can act on the output.

    The Trainer by itself goes by names and by one type: no decay for what is called "bias" or "norm", nor for Layer
    Norm. The gammas of a ResNet, called ``normalization.weight``, it decays everywhere, its betas nowhere.

    Set ``norm_decay`` on the class to ``"all"`` or ``"none"`` for the other rules of :func:`betternorm.param_groups`.

    Examples::

        class MyTrainer(DecayWhereItActs, Trainer):
            pass
    """

    norm_decay: str = "auto"

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """The names of the parameters that get weight decay; the Trainer asks for them."""
        return [row.name for row in param_groups(model, 1.0, self.norm_decay).rows if row.weight_decay]


class TuneAlpha(TrainerCallback):
    """Tune alpha on the Trainer's evaluation data when training ends.

    Args:
        eval_loader: other data instead; the Trainer makes its own loader only where it evaluates during training.
        diagnose: also run :func:`betternorm.diagnose` on that data, before tuning, and log the findings.
        options: of :func:`betternorm.tune_alpha`.

    Attributes:
        found: the :class:`betternorm.AlphaSearch`, after training.
        diagnosis: the :class:`betternorm.Diagnosis`, if ``diagnose=True``.

    Examples::

        trainer = Trainer(model, args, train_dataset=..., eval_dataset=..., callbacks=[TuneAlpha()])
        trainer.train()
        trainer.save_model("tuned")  # alpha is inside
    """

    def __init__(self, eval_loader: Any = None, diagnose: bool = False, **options: Any) -> None:
        self.eval_loader, self.diagnose, self.options = eval_loader, diagnose, options
        self.found: AlphaSearch | None = None
        self.diagnosis: Diagnosis | None = None

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        loader = kwargs.get("eval_dataloader") if self.eval_loader is None else self.eval_loader
        if loader is None:
            raise ValueError(
                "TuneAlpha found no evaluation data: give TuneAlpha(eval_loader=...), or let the Trainer evaluate "
                'during training (eval_strategy="epoch")'
            )
        if self.diagnose:
            with evaluating(kwargs["model"]):
                self.diagnosis = diagnose(kwargs["model"], loader, forward=self.options.get("forward"))
            logging.getLogger("betternorm").info("%s", self.diagnosis)
        self.found = tune_alpha(kwargs["model"], loader, **self.options)
