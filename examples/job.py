"""What `wooly export examples/job.py:build` records: a small classifier, and what it is called with."""

import torch


def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 10)).eval()

    @torch.no_grad()
    def classify(x):
        scores = model.to("cuda")(x).softmax(-1)
        return {"scores": scores, "best": scores.argmax(-1)}

    return classify, (torch.empty(32, 64),)
