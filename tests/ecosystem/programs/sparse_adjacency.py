"""PyTorch Geometric's EdgeIndex: products with adjacency matrices whose rows are not sorted, and paths of two edges."""

import torch
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.transforms import TwoHop
from torch_geometric.utils import coalesce, to_undirected


def run(device):
    source = torch.arange(20).repeat_interleave(3)
    target = (source * 5 + torch.arange(3).repeat(20) * 7 + 1) % 20
    edges = coalesce(to_undirected(torch.stack([source, target]))).to(device)
    x = torch.arange(20 * 8.0).reshape(20, 8).cos().to(device)
    by_row = EdgeIndex(edges, sparse_size=(20, 20)).sort_by("row")[0]
    return {
        "product": by_row.matmul(x),
        "two hops": TwoHop()(Data(x=x, edge_index=edges)).edge_index,
    }
