"""Layers of torch's that keep state, share memory, or look at their weights."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.idioms.side import ROWS, Side, idiom
from tests.models import Composed


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], packed: bool = False) -> None:
        super().__init__()
        self.rnn = kind(7, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.head, self.packed = nn.Linear(10, 3), packed

    def forward(self, x: Tensor) -> Tensor:
        if self.packed:
            lengths = torch.tensor([4, 3, 2, 1])
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            x = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]
            return self.head(x)
        return self.head(self.rnn(x)[0])


def _recurrent(side: Side, net: nn.Module, *units: type[nn.Module]) -> Any:
    model = side.wrap(net, *units, nn.Linear)
    return side.fit(model, loss_of=lambda m, s: m(side.draw(s, ROWS, 4, 7)).square().mean())


@idiom("`LSTM`")
def lstm(side: Side) -> Any:
    return _recurrent(side, Recurrent(nn.LSTM), nn.LSTM)


@idiom("`GRU`")
def gru(side: Side) -> Any:
    return _recurrent(side, Recurrent(nn.GRU), nn.GRU)


@idiom("`LSTM` over packed sequences")
def packed_lstm(side: Side) -> Any:
    return _recurrent(side, Recurrent(nn.LSTM, packed=True), nn.LSTM)


@idiom("`TransformerEncoder`, training and evaluation")
def transformer_encoder(side: Side) -> Any:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    net = nn.Sequential(nn.Linear(7, 8), nn.TransformerEncoder(layer, 2), nn.Linear(8, 3))
    model = side.wrap(net, nn.TransformerEncoderLayer)
    results = side.fit(model, loss_of=lambda m, s: m(side.draw(s, 2, 4, 7)).square().mean())
    model.eval()
    with torch.no_grad():
        return [*results, model(side.draw(9, 2, 4, 7))]


@idiom("`MultiheadAttention`")
def attention(side: Side) -> Any:
    net = Composed(
        lambda net, x: net.head(net.inner(x, x, x, need_weights=False)[0]),
        inner=nn.MultiheadAttention(8, 2, batch_first=True),
        head=nn.Linear(8, 3),
    )
    model = side.wrap(net, nn.MultiheadAttention, nn.Linear)
    return side.fit(model, loss_of=lambda m, s: m(side.draw(s, 2, 4, 8)).square().mean())


def _normed(side: Side, net: nn.Module, *units: type[nn.Module]) -> Any:
    model = side.wrap(net, *units)
    results = side.fit(model)
    model.eval()
    x = side.draw(9, ROWS, 7)
    with torch.no_grad():  # `module` computes with this rank's buffers, the model with rank 0's
        return [*results, side.inner(model)(x), model(x)]


@idiom("`BatchNorm` and its running statistics")
def batch_norm(side: Side) -> Any:
    net = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    return _normed(side, net, nn.Linear, nn.BatchNorm1d)


@idiom("`SyncBatchNorm` (on gloo)")
def sync_batch_norm(side: Side) -> Any:
    net = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    return _normed(side, nn.SyncBatchNorm.convert_sync_batchnorm(net))


@idiom("`LayerNorm`, `GroupNorm`, `RMSNorm`")
def norms(side: Side) -> Any:
    net = nn.Sequential(
        nn.Linear(7, 6), nn.LayerNorm(6), nn.GroupNorm(2, 6), nn.RMSNorm(6), nn.Linear(6, 3)
    )
    return _normed(side, net, nn.Linear, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def _looking(side: Side, table: nn.Module) -> Any:
    net = nn.Sequential(table, nn.Linear(4, 3))
    model = side.wrap(net, nn.Embedding, nn.EmbeddingBag, nn.Linear)
    return side.fit(model, loss_of=lambda m, s: m(side.tokens(s, ROWS, 3)).square().mean())


@idiom("`Embedding` with `padding_idx`, as a unit")
def embedding(side: Side) -> Any:
    return _looking(side, nn.Embedding(10, 4, padding_idx=0))


@idiom("`Embedding(max_norm=...)`, which edits its weight in forward")
def embedding_max_norm(side: Side) -> Any:
    return _looking(side, nn.Embedding(10, 4, max_norm=1.0))


@idiom("`EmbeddingBag`")
def embedding_bag(side: Side) -> Any:
    return _looking(side, nn.EmbeddingBag(10, 4))


@idiom("convolutions")
def convolutions(side: Side) -> Any:
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(1)
    )
    model = side.wrap(net, nn.Conv2d)
    return side.fit(model, loss_of=lambda m, s: m(side.draw(s, 2, 2, 6, 6)).square().mean())


@idiom("a lazy module, after one forward")
def lazy(side: Side) -> Any:
    net = nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.LazyLinear(3))
    net(side.draw(0, ROWS, 7))
    return side.fit(side.wrap(net))


@idiom("a gate that sends rows to experts; every expert runs", unused=True)
def mixture_of_experts(side: Side) -> Any:
    return _experts(side, skips=False)


@idiom("experts that run only if rows are sent to them", unused=True)
def skipped_experts(side: Side) -> Any:
    return _experts(side, skips=True)


@idiom("the same, which flatshard is told by `allow_divergence`", unused=True)
def skipped_experts_declared(side: Side) -> Any:
    return _experts(side, skips=True, divergent=True)


def _experts(side: Side, skips: bool, divergent: bool = False) -> Any:
    def forward(net: Any, x: Tensor) -> Tensor:
        weights = net.gate(x).softmax(-1)
        best = weights.argmax(-1)
        out = x.new_zeros(len(x), 3)
        for index, expert in enumerate(net.experts):
            rows = (best == index).nonzero().flatten()
            if len(rows) or not skips:
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, index, None])
        return out

    experts = nn.ModuleList(nn.Linear(7, 3) for _ in range(4))
    net = Composed(forward, gate=nn.Linear(7, 4), experts=experts)
    return side.fit(side.wrap(net, divergent=divergent))
