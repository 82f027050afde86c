"""Lightning: a module with metrics is trained, validated, saved and loaded by the Trainer."""

import tempfile
import warnings

import lightning
import torch
import torchmetrics
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(4)
        self.f1 = torchmetrics.classification.MulticlassF1Score(4)
        self.losses = []

    def training_step(self, batch, _):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch, _):
        logits = self.net(batch[0])
        self.accuracy(logits, batch[1])
        self.f1(logits, batch[1])
        self.log("accuracy", self.accuracy)
        self.log("f1", self.f1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)}


def run(device):
    warnings.filterwarnings("ignore", module="lightning")
    lightning.seed_everything(0, verbose=False)
    x = torch.arange(128.0 * 20).reshape(128, 20).sin()
    data = TensorDataset(x, (x.sum(1) * 7).long().remainder(4))
    model = Classifier()
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="gpu" if device == "cuda" else "cpu",
            devices=1,
            max_epochs=3,
            gradient_clip_val=0.5,
            accumulate_grad_batches=2,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, DataLoader(data, 16, shuffle=True), DataLoader(data, 32))
        metrics = dict(trainer.callback_metrics)
        loaded = Classifier.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
        predicted = loaded.eval().to(device).net(x.to(device))
    return {
        "losses": torch.stack(model.losses),
        "accuracy": metrics["accuracy"],
        "f1": metrics["f1"],
        "predicted": predicted,
    }
