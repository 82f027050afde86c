"""PyTorch Metric Learning: embeddings learn with many losses, and miners pick pairs and triplets of them."""

import torch
from pytorch_metric_learning import distances, losses, miners, reducers, regularizers

CLASSES, WIDTH = 5, 16
LOSSES = {
    "angular": losses.AngularLoss,
    "arc face": lambda: losses.ArcFaceLoss(CLASSES, WIDTH),
    "circle": losses.CircleLoss,
    "contrastive": losses.ContrastiveLoss,
    "cos face": lambda: losses.CosFaceLoss(CLASSES, WIDTH),
    "cross batch": lambda: losses.CrossBatchMemory(losses.ContrastiveLoss(), WIDTH, memory_size=64),
    "fast ap": losses.FastAPLoss,
    "histogram": lambda: losses.HistogramLoss(n_bins=20),
    "large margin": lambda: losses.LargeMarginSoftmaxLoss(CLASSES, WIDTH),
    "lifted": losses.LiftedStructureLoss,
    "lifted, generalised": losses.GeneralizedLiftedStructureLoss,
    "margin": losses.MarginLoss,
    "multi similarity": losses.MultiSimilarityLoss,
    "n pairs": losses.NPairsLoss,
    "nca": losses.NCALoss,
    "normalised softmax": lambda: losses.NormalizedSoftmaxLoss(CLASSES, WIDTH),
    "nt xent": losses.NTXentLoss,
    "proxy anchor": lambda: losses.ProxyAnchorLoss(CLASSES, WIDTH),
    "proxy nca": lambda: losses.ProxyNCALoss(CLASSES, WIDTH),
    "ranked": lambda: losses.RankedListLoss(margin=1, Tn=1),
    "signal to noise": losses.SignalToNoiseRatioContrastiveLoss,
    "smooth ap": losses.SmoothAPLoss,
    "soft triple": lambda: losses.SoftTripleLoss(CLASSES, WIDTH),
    "sphere face": lambda: losses.SphereFaceLoss(CLASSES, WIDTH),
    "sub-centres": lambda: losses.SubCenterArcFaceLoss(num_classes=CLASSES, embedding_size=WIDTH),
    "supervised": losses.SupConLoss,
    "triplet": lambda: losses.TripletMarginLoss(
        distance=distances.CosineSimilarity(),
        reducer=reducers.ThresholdReducer(low=0),
        embedding_regularizer=regularizers.LpRegularizer(),
    ),
    "tuplet": losses.TupletMarginLoss,
}
MINERS = {
    "angular": miners.AngularMiner,
    "easy and hard": miners.BatchEasyHardMiner,
    "hard": miners.BatchHardMiner,
    "hdc": miners.HDCMiner,
    "multi similarity": miners.MultiSimilarityMiner,
    "pairs": miners.PairMarginMiner,
    "semihard": lambda: miners.TripletMarginMiner(type_of_triplets="semihard"),
}


def run(device):
    results = {}
    x = torch.randn(20, 8, generator=torch.Generator().manual_seed(0)).to(device)
    labels = (torch.arange(20) % CLASSES).to(device)
    for name, make in LOSSES.items():
        torch.manual_seed(0)
        net, loss = torch.nn.Linear(8, WIDTH).to(device), make().to(device)
        optimizer = torch.optim.Adam([*net.parameters(), *loss.parameters()], 1e-2)
        for k in range(3):
            optimizer.zero_grad()
            value = loss(net(x), labels)
            value.backward()
            optimizer.step()
            results[f"{name} {k}"] = value
        results[name] = net.weight
    embedded = torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(3))
    embedded = torch.nn.functional.normalize(embedded).to(device)
    for name, make in MINERS.items():
        for k, picked in enumerate(make()(embedded, labels)):
            results[f"{name} miner {k}"] = picked
    return results
