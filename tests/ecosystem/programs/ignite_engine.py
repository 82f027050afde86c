"""PyTorch Ignite: a supervised trainer and evaluator with metrics."""

import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy, ConfusionMatrix, Loss
from torch.utils.data import DataLoader, TensorDataset


def run(device):
    x = torch.arange(96.0 * 10).reshape(96, 10).cos()
    data = TensorDataset(x, (x.sum(1) * 5).long().remainder(3))
    model = torch.nn.Sequential(
        torch.nn.Linear(10, 16), torch.nn.BatchNorm1d(16), torch.nn.GELU(), torch.nn.Linear(16, 3)
    ).to(device)
    criterion = torch.nn.CrossEntropyLoss()
    trainer = create_supervised_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), criterion, device=device)
    metrics = {"accuracy": Accuracy(), "loss": Loss(criterion), "confusion": ConfusionMatrix(3)}
    evaluator = create_supervised_evaluator(model, metrics, device=device)
    losses = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: evaluator.run(DataLoader(data, 32)))
    trainer.run(DataLoader(data, 16), max_epochs=3)
    return {"losses": losses, **evaluator.state.metrics}
