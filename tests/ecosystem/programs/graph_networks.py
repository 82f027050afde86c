"""PyTorch Geometric: convolutions, attention, pooling and batches of graphs; its sparse paths, too."""

import torch
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv, TransformerConv, global_mean_pool
from torch_geometric.utils import to_dense_adj, to_torch_csr_tensor


def graph(nodes, k):
    source = torch.arange(nodes).repeat_interleave(3)
    target = (source * 5 + torch.arange(3).repeat(nodes) * 7 + k) % nodes
    return Data(
        x=torch.arange(nodes * 8.0).reshape(nodes, 8).cos() + k, edge_index=torch.stack([source, target]), y=k % 3
    )


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gcn, self.gat, self.sage = GCNConv(8, 16), GATConv(16, 8, heads=2), SAGEConv(16, 16, aggr="max")
        self.gin = GINConv(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU()))
        self.transformer, self.out = TransformerConv(16, 16, dropout=0.0), torch.nn.Linear(16, 3)

    def forward(self, x, edges, batch):
        x = self.gcn(x, edges).relu()
        x = self.gat(x, edges).relu()
        x = self.sage(x, edges).relu()
        x = self.gin(x, edges)
        return self.out(global_mean_pool(self.transformer(x, edges), batch))


def run(device):
    batch = Batch.from_data_list([graph(10 + k, k) for k in range(6)]).to(device)
    model = Network().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(batch.x, batch.edge_index, batch.batch), batch.y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    adjacency = to_torch_csr_tensor(batch.edge_index, size=(batch.num_nodes, batch.num_nodes))
    sparse = SAGEConv(8, 4, aggr="mean").to(device)(batch.x, adjacency.t())
    dense = to_dense_adj(batch.edge_index, batch.batch).sum((1, 2))
    return {"losses": losses, "sparse": sparse, "dense": dense}
