"""skorch: a network as a scikit-learn estimator, in a pipeline and a grid search."""

import numpy as np
import torch
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from skorch import NeuralNetClassifier
from skorch.callbacks import EpochScoring


class Network(torch.nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, width), torch.nn.ReLU(), torch.nn.Linear(width, 2), torch.nn.Softmax(-1)
        )

    def forward(self, x):
        return self.layers(x)


def run(device):
    x = np.cos(np.arange(360.0)).reshape(60, 6).astype(np.float32)
    y = (x.sum(1) > 0).astype(np.int64)
    torch.manual_seed(0)
    net = NeuralNetClassifier(
        Network, max_epochs=4, lr=0.1, device=device, verbose=0, callbacks=[EpochScoring("accuracy", name="acc")]
    )
    pipeline = make_pipeline(StandardScaler(), net).fit(x, y)
    search = GridSearchCV(net, {"module__width": [4, 8], "lr": [0.05]}, cv=2, refit=True).fit(x, y)
    return {
        "probabilities": pipeline.predict_proba(x),
        "losses": pipeline[-1].history[:, "train_loss"],
        "scores": search.cv_results_["mean_test_score"],
    }
