"""The Trainer of Hugging Face Transformers with our decay groups and callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import betternorm
from betternorm.integrations.checkpoints import load_checkpoint
from betternorm.integrations.transformers import DecayWhereItActs, TuneAlpha

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore::betternorm.errors.UncertainGainWarning")


def network() -> Any:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=4
    )
    return transformers.ResNetForImageClassification(config)


def data() -> list[dict[str, torch.Tensor]]:
    return [{"pixel_values": torch.randn(3, 32, 32), "labels": torch.tensor(n % 4)} for n in range(16)]


def arguments(folder: Path, **options: Any) -> Any:
    return transformers.TrainingArguments(
        str(folder),
        max_steps=2,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        weight_decay=0.1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )


class OurTrainer(DecayWhereItActs, transformers.Trainer):
    pass


def test_the_trainer_decays_gamma_and_beta_where_that_can_act(tmp_path: Path) -> None:
    model = network()
    plain = transformers.Trainer(model, arguments(tmp_path)).get_decay_parameter_names(model)
    ours = OurTrainer(model, arguments(tmp_path)).get_decay_parameter_names(model)
    last = "resnet.encoder.stages.1.layers.0.layer.1.normalization"
    first = "resnet.embedder.embedder.normalization"
    # By name: every gamma, no beta.
    assert f"{first}.weight" in plain
    assert f"{last}.bias" not in plain
    # By effect: those of the last block, which nothing undoes.
    assert {f"{last}.weight", f"{last}.bias"} <= set(ours)
    expected = {row.name for row in betternorm.param_groups(model, 0.1).rows if row.weight_decay}
    assert set(ours) == expected


def test_the_optimizer_is_built_from_those_names(tmp_path: Path) -> None:
    model = network()
    optimizer = OurTrainer(model, arguments(tmp_path)).create_optimizer()
    wanted = betternorm.param_groups(model, 0.1)
    for group in optimizer.param_groups:
        expected = {
            p for ours in wanted if bool(ours["weight_decay"]) == bool(group["weight_decay"]) for p in ours["params"]
        }
        assert set(group["params"]) == expected


def test_alpha_is_tuned_after_training_and_saved_with_the_model(tmp_path: Path) -> None:
    model = betternorm.convert(network(), "ghost", ghost_size=4)
    tune = TuneAlpha(objective="top1", require_significant=False, grid=[0, 0.25], diagnose=True)
    options = arguments(tmp_path, eval_strategy="steps", eval_steps=1)
    trainer = OurTrainer(model, options, train_dataset=data(), eval_dataset=data(), callbacks=[tune])
    trainer.train()
    assert tune.found is not None
    assert tune.found.examples == 16
    assert tune.diagnosis is not None
    assert tune.diagnosis.examples == 16
    assert "train_mode" not in [finding.cause for finding in tune.diagnosis.findings]
    assert betternorm.get_alpha(model) == tune.found.alpha
    betternorm.set_alpha(model, 0.25)
    trainer.save_model(str(tmp_path / "tuned"))
    again = load_checkpoint(network(), tmp_path / "tuned" / "model.safetensors")
    assert betternorm.get_alpha(again) == 0.25
    image = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(again.eval()(image).logits, model.eval()(image).logits)


def test_without_evaluation_data_it_says_what_to_do(tmp_path: Path) -> None:
    trainer = transformers.Trainer(network(), arguments(tmp_path), train_dataset=data(), callbacks=[TuneAlpha()])
    with pytest.raises(ValueError, match=r"pass TuneAlpha\(eval_loader=...\)"):
        trainer.train()
