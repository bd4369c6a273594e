"""For the Trainer of Hugging Face Transformers: weight decay where it has an effect, alpha tuned after training."""

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
    """Mixin for a Trainer: weight decay on gamma and beta in the layers where it has an effect.

    The Trainer itself decides by name and type: no weight decay for parameters called "bias" or "norm" and for
    LayerNorm. In a ResNet, this decays all gammas (``normalization.weight``) and no betas.

    Set the class attribute ``norm_decay`` to ``"all"`` or ``"none"`` for the other rules of
    :func:`betternorm.param_groups`.

    Examples::

        class MyTrainer(DecayWhereItActs, Trainer):
            pass
    """

    norm_decay: str = "auto"

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """The names of the parameters with weight decay, as the Trainer expects them."""
        return [row.name for row in param_groups(model, 1.0, self.norm_decay).rows if row.weight_decay]


class TuneAlpha(TrainerCallback):
    """Tune alpha on the Trainer's evaluation data when training ends.

    Args:
        eval_loader: the data to use instead. The Trainer creates its own loader only if it evaluates during training.
        diagnose: whether to run :func:`betternorm.diagnose` on this data before tuning, and log the findings.
        **options: of :func:`betternorm.tune_alpha`.

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
                "TuneAlpha has no evaluation data: pass TuneAlpha(eval_loader=...), or let the Trainer evaluate "
                'during training (eval_strategy="epoch")'
            )
        if self.diagnose:
            with evaluating(kwargs["model"]):
                self.diagnosis = diagnose(kwargs["model"], loader, forward=self.options.get("forward"))
            logging.getLogger("betternorm").info("%s", self.diagnosis)
        self.found = tune_alpha(kwargs["model"], loader, **self.options)
