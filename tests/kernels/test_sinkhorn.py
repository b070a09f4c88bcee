"""Sinkhorn's iterations: by hand, and as transformers' hyper-connections compute them."""

from __future__ import annotations

import torch
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

from precast.builder.capture.attentions import ATTENTIONS
from precast.kernels.registry import register
from precast.kernels.sinkhorn.sinkhorn import sinkhorn


def test_columns_then_rows_then_columns() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 6.0])

    assert torch.allclose(sinkhorn(x, size=2, iterations=1, eps=0.0), torch.tensor([0.25, 0.25, 0.75, 0.75]))
    assert torch.allclose(sinkhorn(x, size=2, iterations=2, eps=0.0), torch.tensor([0.5, 0.5, 0.5, 0.5]))
    assert torch.allclose(sinkhorn(x, size=2, iterations=1, eps=4.0), torch.tensor([1 / 8, 2 / 12, 3 / 8, 6 / 12]))


def test_hyper_connections_are_those_of_transformers() -> None:
    register()
    config = DeepseekV4Config(hidden_size=12, hc_mult=3, hc_sinkhorn_iters=4, hc_eps=0.01, num_hidden_layers=1)
    module = v4.DeepseekV4HyperConnection(config)
    for param in module.parameters():
        param.data = torch.randn(param.shape, generator=torch.Generator().manual_seed(2))
    streams = torch.randn(1, 5, 3, 12, generator=torch.Generator().manual_seed(3))

    with torch.no_grad():
        expected, found = module(streams), ATTENTIONS["DeepseekV4HyperConnection"][1](module, streams)

    for mine, theirs in zip(found, expected, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
